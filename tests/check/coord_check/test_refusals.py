"""What the check refuses, and what it calls a finding instead."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from smupar.check.coordinates.readings import DY
from smupar.check.coordinates.verdict import FAIL
from tests.check.grid import Fork, batches_of, check
from tests.support.loops import loss_of


class Own(nn.Module):
    """Has no layer that could be measured."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Parameter(torch.randn(width, width))
        self.first = nn.Parameter(torch.randn(width))


def per_sample(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def after(change):
    """A loss that something was done to."""
    return {"loss_fn": lambda model, batch: change(loss_of(model, batch))}


SAME_SHAPES = r"make_model\(16\) and make_model\(8\) have the same shapes: make_model must use its"
NO_STEPS = "steps and seeds must be at least 1"
REFUSED = [
    ({"loss_fn": per_sample}, r"scalar tensor, got \(32,\).*\.mean\(\)"),
    (after(lambda loss: loss.item()), "scalar tensor, got float"),
    (after(lambda loss: (loss, None)), "scalar tensor, got tuple"),
    (after(lambda loss: loss.detach()), "loss_fn"),
    (after(lambda loss: loss * math.nan), r"the loss is nan before any step \(rule smupar, width 16, density 1\).*init_std"),
    (after(lambda loss: loss + math.inf), "the loss is inf before any step"),
    (
        {"densities": (1,)},
        r"nothing to compare: widths=\[16\] and densities=\[1\.0\].*at least two widths, two densities or two depths",
    ),
    ({"densities": (1, 1.0), "widths": (16, 16)}, "nothing to compare"),
    *(({"make_model": lambda width: Fork(16), "widths": widths}, SAME_SHAPES) for widths in ((), (8,), (16,), (8, 16))),
    ({"make_model": lambda width: Fork(min(width, 16)), "widths": (16, 32), "densities": (1,)}, "same shapes"),
    (
        {"batches": batches_of(3), "steps": 5},
        r"batches ran out: 5 steps need as many batches, but there are 3; pass more batches, or fewer",
    ),
    *(
        ({"batches": batches_of(3), **nothing}, NO_STEPS)
        for nothing in ({"steps": 0}, {"steps": -1}, {"seeds": 0}, {"seeds": ()})
    ),
    ({"rules": ("super",)}, "unknown rule 'super': choose one of sp, mup, smupar"),
    ({"rules": ()}, "rule"),
    # These would be overwritten in silence: rules, densities and seeds say it here.
    *(({name: value}, name) for name, value in {"rule": "mup", "density": 0.25, "seed": 3}.items()),
    (
        {"make_model": Own, "loss_fn": lambda m, _: (m.first @ m.inner).mean(), "batches": [None], "widths": (8, 16)},
        "nothing could be measured",
    ),
    ({"optimizer": lambda model, plan: None}, "returned no optimizer"),
    *(
        ({"optimizer": lambda model, plan: None, name: 0.1}, "sets the learning rate and the decay: leave out lr=")
        for name in ("lr", "weight_decay")
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_checks_that_make_no_sense_are_refused(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        check(**changes)


def test_loss_that_explodes_later_is_a_finding(tmp_path):
    calls = []

    def loss_fn(model, batch):
        calls.append(torch.is_grad_enabled())
        # Passes with gradients are the training steps; every third one of each run is beyond repair.
        return loss_of(model, batch) * (math.inf if sum(calls) % 3 == 0 and calls[-1] else 1)

    report = check(loss_fn=loss_fn, steps=3)
    assert report.verdicts == {"smupar": FAIL}
    assert [found.cause for found in report.diagnoses if not found.is_caution] == ["diverged"]
    assert "lower the learning rate" in report.explain()
    assert max(reading.step for reading in report.readings) == 3
    assert {reading.step for reading in report.readings if reading.quantity == DY} == {1, 2}
    # The picture of what was measured before that is whole, although the last step has no updates to show.
    panels = [axes for axes in report.plot(tmp_path / "check.png").axes if axes.get_lines()]
    assert [[label.get_text() for label in axes.get_xticklabels()] for axes in panels] == [["1/2", "1"]] * 3


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.0},
        {"optimizer": lambda model, plan: torch.optim.SGD(smupar.param_groups(model, plan, lr=0.0, optimizer="sgd"))},
    ],
)
def test_check_in_which_nothing_moves_does_not_pass(settings):
    report = check(**settings)
    assert not report.ok
    assert "nothing was trained" in report.explain()
