"""Models that are built while others train are those that would have been built afterwards."""

import contextlib
import warnings
from dataclasses import replace

import torch

from smupar.lm.data.batches import open_text
from smupar.lm.run.stack import GPTStack
from smupar.plan.plan import PlanWarning
from smupar.study.stacks.ahead import BuiltAhead
from tests.study.tiny import TINY

CPU = torch.device("cpu")
FIRST, NEXT = [replace(TINY, sparsity=0.5)], [replace(TINY, sparsity=0.75, seed=3)]


def _losses(stack):
    return [stack.step(number).item() for number in range(5)]


def test_runs_built_while_others_train_have_the_losses_of_a_fresh_stack():
    fresh, stack = (
        GPTStack(NEXT, open_text(TINY), CPU, own_batches=True),
        GPTStack(FIRST, open_text(TINY), CPU, own_batches=True),
    )
    with contextlib.closing(BuiltAhead()) as ahead, warnings.catch_warnings(action="ignore", category=PlanWarning):
        ahead.start(NEXT)
        _losses(stack)
        stack.refill(NEXT, ahead.take(NEXT))
    assert _losses(stack) == _losses(fresh)


def test_runs_that_were_not_built_ahead_are_not_mistaken_for_those_that_were():
    with contextlib.closing(BuiltAhead()) as ahead, warnings.catch_warnings(action="ignore", category=PlanWarning):
        assert ahead.take(NEXT) is None
        ahead.start(NEXT)
        assert ahead.take(FIRST) is None
        assert ahead.take(NEXT) is None  # they are built only once
