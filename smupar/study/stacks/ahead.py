"""Builds the models of the next runs in a thread, while a GPU trains the current ones. Without this the GPU would wait: drawing
masks and weights takes about as long as 200 steps of a small model."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from smupar.lm.config.run_config import RunConfig
from smupar.lm.model.gpt import GPT
from smupar.lm.run.stack import build_all
from smupar.plan.plan import Plan

Built = list[tuple[GPT, Plan]]


class BuiltAhead:
    """Holds the models of at most one stack. The caller must ignore ``PlanWarning`` meanwhile, because Python's filters of
    warnings belong to the process and not to a thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._begun: tuple[list[RunConfig], Future[Built]] | None = None

    def start(self, configs: Sequence[RunConfig]) -> None:
        self._begun = list(configs), self._pool.submit(build_all, configs)

    def take(self, configs: Sequence[RunConfig]) -> Built | None:
        """The models and plans of these runs; None if they were not started."""
        begun, self._begun = self._begun, None
        return begun[1].result() if begun is not None and begun[0] == list(configs) else None

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
