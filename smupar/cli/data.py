"""``smupar data`` turns text into tokens on disk, and checks them."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Annotated

from smupar.cli.answers import Reply, TextLine
from smupar.cli.commands import Folder
from smupar.cli.flags import Typed
from smupar.cli.loading import loading
from smupar.cli.studies import verify as compare
from smupar.lm.config.commands import PrepareConfig


def data() -> None:
    """Turn text into tokens on disk, and check them."""
    # This function exists only for its help text, since its steps are commands.


def prepare(config: Annotated[Typed, PrepareConfig]) -> Reply:
    """Turn text, JSONL, Parquet or a Hugging Face dataset into token shards that `smupar train --data` reads."""
    chosen = PrepareConfig(**config)
    with loading():
        from smupar.lm.data.prepare import prepare as make

    index = make(chosen)
    line = (
        f"{index.num_tokens:,} tokens of {index.num_documents:,} documents ({index.tokenizer.name}, vocabulary "
        f"{index.tokenizer.vocab_size:,}) in {len(index.shards)} shard{'s' if len(index.shards) > 1 else ''}: "
        f"smupar train --data {shlex.quote(chosen.out)}"
    )
    values = {
        "folder": chosen.out,
        "tokens": index.num_tokens,
        "documents": index.num_documents,
        "shards": len(index.shards),
        "tokenizer": asdict(index.tokenizer),
    }
    return Reply([TextLine(line)], values)


def verify(folder: Folder) -> Reply:
    """Verify a folder of prepared text, like `smupar verify`.

    Args:
        folder: Folder made by `smupar data prepare`.
    """
    return compare(folder)
