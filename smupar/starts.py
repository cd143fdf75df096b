"""Where the flags of a run begin, before they are parsed: a recipe, tuned values and the vocabulary of the data make its
defaults, and flags that would do nothing are refused."""

from __future__ import annotations

import warnings
from dataclasses import replace

from smupar.lm.config import STANDARD_LIBRARY, RunConfig
from smupar.lm.recipes import recipe

# Flags of a run that `transfer` sets itself.
_OF_TRANSFER = {
    "--width": "name the targets' with --widths, the proxy's with --base-width",
    "--sparsity": "name the targets' with --sparsities",
    "--rule": "name those to compare with --rules",
    "--correction": "compare --rules smupar (as in the paper) and moment",
    "--follow": "a trace of the proxy is recorded and followed by --rules measured",
    "--record": "a trace of the proxy is recorded and followed by --rules measured",
}
# Flags of masks that move, and the kinds that they are for.
_OF_MASKS = {
    "--mask-every": ("rigl", "set", "gmp"),
    "--mask-stop": ("rigl", "set", "gmp"),
    "--drop-fraction": ("rigl", "set"),
    "--rounds": ("imp",),
    "--correction": ("gmp", "imp"),
}
# Flags of optimizers, likewise.
_OF_OPTIMIZERS = {
    "--momentum": ("sgd", "muon"),
    "--betas": ("adamw", "adam", "adamax", "nadam", "radam", "lion", "muon"),
}
_OF_DRY_RUNS = ("--gpus", "--gpu-gib", "--peak-share")


def _refuse_what_does_nothing(argv: list[str], start: RunConfig) -> None:
    optimizer = (_flag(argv, "--optimizer") or start.optimizer).lower()
    optimizers = {} if _flag(argv, "--rest-lr") else _OF_OPTIMIZERS  # with it there is an AdamW beside
    positions = _flag(argv, "--positions") or start.model.positions
    for flags, by, chosen in (
        (_OF_MASKS, "--dynamic", _flag(argv, "--dynamic") or start.dynamic),
        (optimizers, "--optimizer", optimizer),
        ({"--context": ("learned",)}, "--positions", positions),
    ):
        for flag, kinds in flags.items():
            if _flag(argv, flag) is not None and chosen not in kinds:
                raise ValueError(f"{flag} does nothing with {by} {chosen}: it is for {', '.join(kinds)}")
    for flag in _OF_DRY_RUNS:
        if _flag(argv, flag) is not None and "--dry-run" not in argv:
            raise ValueError(f"{flag} is for --dry-run; on several GPUs: torchrun --nproc-per-node 8 -m smupar train ...")


def _refuse_what_transfer_sets(argv: list[str]) -> None:
    swept = "--" + (_flag(argv, "--axis") or "lr").replace("_", "-")
    for flag, remedy in {**_OF_TRANSFER, swept: "it is what is swept, name its values with --values"}.items():
        if any(word == flag or word.startswith(flag + "=") for word in argv):
            raise ValueError(f"transfer has no use for {flag}: {remedy}")


def dashed(word: str) -> str:
    """A flag as it is documented: --base_width is --base-width."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if word.startswith("--") else word


def start_of(argv: list[str]) -> tuple[str, RunConfig]:
    """Where the flags of a run begin: its recipe, which depends on the rule, with a vocabulary that fits its data."""
    if argv[0] == "transfer":
        _refuse_what_transfer_sets(argv)
    name = argv[1] if argv[0] in ("train", "plan") and len(argv) > 1 and not argv[1].startswith("-") else "demo"
    width = _flag(argv, "--width") or ""
    start = recipe(name, _flag(argv, "--rule") or "smupar", int(width) if width.isdigit() else None)
    if argv[0] == "train":
        _refuse_what_does_nothing(argv, start)
    if (tuned := _flag(argv, "--hps")) is not None:  # flags come after it, and win
        from smupar.study.space import with_fields
        from smupar.study.tune import doubts, read_hps

        hps = read_hps(tuned)
        if (asked := _flag(argv, "--base-width")) not in (None, str(hps["base_width"])):
            raise ValueError(f"what {tuned} holds is for --base-width {hps['base_width']}, not {asked}: leave the flag out")
        if argv[0] != "transfer" and _flag(argv, "--lr") is None:
            chosen = {"optimizer": _flag(argv, "--optimizer") or start.optimizer, "rule": _flag(argv, "--rule") or start.rule}
            for doubt in doubts(tuned, **chosen):
                warnings.warn(doubt, UserWarning, stacklevel=2)
        start = with_fields(start, hps)
    base = _flag(argv, "--base-width") or ""
    if argv[0] == "tune" and base.isdigit():  # the proxy's width, unless --width says another
        start = replace(start, base_width=int(base))
    text = _flag(argv, "--data")
    if text is None or text == STANDARD_LIBRARY:
        return name, start
    from smupar.lm.data import padded_vocab
    from smupar.lm.shards import read_index

    needed = read_index(text).tokenizer.vocab_size
    if needed > start.model.vocab_size:
        start = replace(start, model=replace(start.model, vocab_size=padded_vocab(needed)))
    return name, start


def _flag(argv: list[str], flag: str) -> str | None:
    """Its value; of several the last, as tyro has it."""
    found = None
    for word, after in zip(argv, [*argv[1:], None], strict=True):
        if word == flag:
            found = after
        elif word.startswith(flag + "="):
            found = word.partition("=")[2]
    return found
