"""What sparsifiers and masks at init refuse, and the words they do it with."""

import pytest
import torch

import smupar
from tests.dynamic.moving import make, moving, ready
from tests.support.loops import adamw, loss_of, tokens_of
from tests.support.models import TokenNet
from tests.support.wiring import wiring

NEVER_MOVES = "masks would never move: no multiple of every=100 lies between 0 and stop=75"
NO_END = r"every must be at least 1, and stop after start"
TOO_LATE = r"masks would move until step 1[12], but the run ends at 10: choose an earlier stop"
DENSE = "no hidden weight is sparse, so no mask can move: pass a density below 1"
OTHER_MODEL = r"'mix\.weight' is in none of the optimizers"
RESTART = "restart_bias_correction is for Adam and AdamW without amsgrad, not "
NOTHING_LEFT = r"density 0\.001 would drop every weight of 'mix.weight', of shape \(16, 16\): raise it"


def of_another_model(model, plan):
    return adamw(*make())


def sgd(model, plan):
    return torch.optim.SGD(smupar.param_groups(model, plan, lr=0.1, optimizer="sgd"))


def amsgrad(model, plan):
    return adamw(model, plan, amsgrad=True)


def plain(model, plan):
    return torch.optim.AdamW(model.parameters())


def scheduled(model, plan):
    optimizer = adamw(model, plan)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return optimizer


REFUSED = [
    *((kind, {"stop": 10, "drop_fraction": fraction}, rf"drop_fraction must lie in \(0, 1\), got {fraction}")
      for kind in ("RigL", "SET") for fraction in (0, 1, -0.1)),
    ("RigL", {"start": 10, "stop": 10}, NO_END),
    ("SET", {"start": 10, "stop": 5}, NO_END),
    ("GMP", {"density": 0.1, "start": 10, "stop": 5}, NO_END),
    ("RigL", {"start": -1, "stop": 5}, NO_END),
    ("RigL", {"every": 0, "stop": 5}, NO_END),
    ("RigL", {"steps": 10, "stop": 11}, TOO_LATE),
    ("SET", {"steps": 10, "stop": 11}, TOO_LATE),
    ("GMP", {"steps": 10, "density": 0.1, "stop": 11}, TOO_LATE),
    ("IMP", {"steps": 10, "density": 0.1, "rounds": 3, "every": 4}, TOO_LATE),
    ("RigL", {"stop": 10, "decay": "step"}, "decay must be one of 'cosine', 'linear', 'constant', got 'step'"),
    ("GMP", {"stop": 10, "density": 0.1, "curve": "square"}, "curve must be one of 'cubic', 'linear', 'cosine', got 'square'"),
    ("GMP", {"stop": 10, "density": 0.1, "pool": "all"}, "pool must be one of 'layer', 'global', got 'all'"),
    ("GMP", {"stop": 10, "density": 0.1, "correction": "none"}, "correction must be one of 'moment', 'fixed', got 'none'"),
    ("IMP", {"density": 0.1, "rounds": 0, "every": 5, "rewind": 0}, "at least one round"),
    ("IMP", {"density": 0.1, "rounds": 2, "every": 5, "rewind": 5}, r"\[0, 5\)"),
    ("IMP", {"density": 0.1, "rounds": 2, "every": 5, "rewind": -1}, "got -1"),
    ("RigL", {"every": 100, "stop": 75}, NEVER_MOVES),
    ("SET", {"every": 100, "stop": 75}, NEVER_MOVES),
    ("RigL", {"stop": 10, "start_from": 1.0}, DENSE),
    ("SET", {"stop": 10, "start_from": 1.0}, DENSE),
    ("GMP", {"stop": 10, "density": 0.5, "start_from": 0.25},
     r"'mix.weight' already has density 0\.25, and pruning would end at 0\.5"),
    ("GMP", {"stop": 10, "density": 0.001}, NOTHING_LEFT),
    ("RigL", {"stop": 100, "optimizer": of_another_model}, OTHER_MODEL),
    ("GMP", {"stop": 100, "density": 0.1, "optimizer": of_another_model}, OTHER_MODEL),
    ("GMP", {"stop": 10, "density": 0.1, "optimizer": plain},
     r"group with '.*weight' was not made by smupar\.param_groups: build the optimizer from"),
    ("GMP", {"stop": 10, "density": 0.1, "optimizer": scheduled},
     r"this optimizer already has a scheduler.*make the scheduler afterwards"),
    ("RigL", {"stop": 10, "restart_bias_correction": True, "optimizer": sgd}, RESTART + "SGD: leave it out"),
    ("SET", {"stop": 10, "restart_bias_correction": True, "optimizer": sgd}, RESTART + "SGD: leave it out"),
    ("RigL", {"stop": 10, "restart_bias_correction": True, "optimizer": amsgrad}, RESTART + "AdamW"),
    *((kind, {"stop": 10, "start_from": 0.5, "plan_settings": {"pattern": pattern}, **own},
       rf"masks that move are unstructured, so pattern '{pattern}' would be lost")
      for pattern in ("2:4", "fan_in") for kind, own in (("RigL", {}), ("SET", {}), ("GMP", {"density": 0.1}))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "message"), REFUSED)
def test_sparsifiers_that_make_no_sense_are_refused_and_change_nothing(kind, settings, message):
    before = []

    def optimizer(model, plan):
        made = settings.get("optimizer", adamw)(model, plan)
        before.extend((model, made, wiring(model, made)))
        return made

    with pytest.raises(ValueError, match=message):
        moving(kind, **{"every": 5} | settings | {"optimizer": optimizer})
    model, made, was = before
    assert wiring(model, made) == was


def test_fixed_correction_of_weights_that_were_scaled_is_refused_and_changes_nothing():
    model, plan, optimizer = ready(1.0)
    with torch.no_grad():
        model.up.weight.mul_(3)
    before = wiring(model, optimizer)
    with pytest.raises(ValueError, match=r"'up\.weight' has std .*: correction='fixed' scales the init, so make the"):
        smupar.GMP(model, plan, optimizer, density=0.1, stop=10, correction="fixed")
    assert wiring(model, optimizer) == before


def test_audit_still_rejects_a_model_whose_sparsifier_was_refused():
    model, plan, optimizer = ready()
    with torch.no_grad():
        model.up.weight.mul_(3)
    for _ in range(2):
        with pytest.raises(smupar.AuditError, match=r"up\.weight"):
            smupar.audit(model, plan, optimizer)
        with pytest.raises(ValueError, match="masks would never move"):
            smupar.RigL(model, plan, optimizer, every=100, stop=50)


@pytest.mark.parametrize(("kind", "settings"), [("RigL", {}), ("SET", {}), ("GMP", {"density": 0.1})])
def test_model_must_be_parameterized(kind, settings):
    _, plan = make()
    other = TokenNet()
    with pytest.raises(ValueError, match=r"this model is not parameterized: call smupar\.parameterize before masks move"):
        getattr(smupar, kind)(other, plan, torch.optim.AdamW(other.parameters()), every=5, stop=10, **settings)


def test_masks_at_init_that_make_no_sense_are_refused():
    model, plan = make(1.0)
    with pytest.raises(ValueError, match=NOTHING_LEFT):
        smupar.magnitude_masks(model, plan, density=0.001)
    with pytest.raises(ValueError, match="pool must be one of 'layer', 'global', got 'all'"):
        smupar.snip_masks(model, plan, loss_of, [tokens_of(0)], density=0.5, pool="all")
    with pytest.raises(ValueError, match="SNIP needs at least one batch"):
        smupar.snip_masks(model, plan, loss_of, [], density=0.5)


def test_rigl_without_a_gradient_says_so():
    _, optimizer, rigl = moving("RigL", every=1, stop=10)
    optimizer.step()
    message = r"'mix.weight' got no dense gradient, which RigL needs: call sparsifier\.step\(\) after"
    with pytest.raises(ValueError, match=message):
        rigl.step()
