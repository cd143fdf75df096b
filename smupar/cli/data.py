"""``smupar data`` turns text into tokens on disk, and checks them."""

from __future__ import annotations

import shlex
from typing import Annotated

import tyro

from smupar.cli.commands import verify as compare
from smupar.cli.flags import Call, Typed, parser_of
from smupar.lm.config.commands import PrepareConfig


def prepare(config: Annotated[Typed, PrepareConfig]) -> None:
    """Turn text, JSONL, Parquet or a Hugging Face dataset into token shards that `smupar train --data` reads."""
    from smupar.lm.data.prepare import prepare as make

    chosen = PrepareConfig(**config)
    index = make(chosen)
    print(
        f"{index.num_tokens:,} tokens of {index.num_documents:,} documents ({index.tokenizer.name}, vocabulary "
        f"{index.tokenizer.vocab_size:,}) in {len(index.shards)} shard{'s' if len(index.shards) > 1 else ''}: "
        f"smupar train --data {shlex.quote(chosen.out)}"
    )


def verify(folder: tyro.conf.Positional[str]) -> None:
    """The same as `smupar verify`, for a folder of prepared text.

    Args:
        folder: Folder made by `smupar data prepare`.
    """
    compare(folder)


DataStep = tyro.conf.OmitSubcommandPrefixes[
    Annotated[Call, tyro.conf.subcommand("prepare", constructor_factory=lambda: parser_of(prepare, {}))]
    | Annotated[Call, tyro.conf.subcommand("verify", constructor_factory=lambda: parser_of(verify, {}))]
]


def data(step: DataStep) -> None:
    """Turn text into tokens on disk, and check them: `smupar data prepare` and `smupar verify`."""
    # This function exists for its help text only: main.parse recognises both steps before it would call this.
