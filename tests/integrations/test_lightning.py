"""The callback for Lightning: groups, masks that move, measured updates, checkpoints. In a file of its own: a slow import."""

import importlib
import sys
from functools import partial
from itertools import pairwise

import lightning
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import smupar
from smupar.integrations.lightning import SmuparCallback
from smupar.model.attached import is_parameterized, mask_of
from smupar.updates.observation import Observation

HIDDEN = "layers.2.weight"
# Lightning's advice about workers and its use of torch's deprecated names.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*many workers"),
]


class MLP(lightning.LightningModule):
    def __init__(self, width, configure="plain"):
        super().__init__()
        widths = [8, width, width, width, 4]
        layers = [layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), nn.ReLU())]
        self.layers = nn.Sequential(*layers[:-1])
        self.configure = configure
        self.losses = []

    def training_step(self, batch, number):
        inputs, targets = batch
        loss = F.cross_entropy(self.layers(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        if self.configure == "none":
            return None
        if self.configure == "plain":
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
        if self.configure == "two groups":
            first, *rest = self.parameters()
            return torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr=1e-2)
        if self.configure == "scheduler over plain groups":
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        else:
            optimizer = torch.optim.AdamW(self.smupar.param_groups(lr=1e-2, weight_decay=0.1))
            if self.configure == "watched":
                self.smupar.watch(optimizer)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batches(number=6):
    """The same batch again and again: Lightning does not go back to where it was in an epoch."""
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    targets = inputs[:, :4].argmax(1)
    return DataLoader(TensorDataset(inputs.repeat(number, 1), targets.repeat(number)), batch_size=16)


def trainer(callback, steps=12, **settings):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(max_steps=steps, callbacks=[callback], accelerator="cpu", **{**quiet, **settings})


def callback(what=None, **settings):
    made = {
        None: {"density": 0.25},
        "RigL": {"density": 0.25, "sparsifier": partial(smupar.RigL, every=2, stop=9)},
        "GMP": {"sparsifier": partial(smupar.GMP, density=0.25, every=2, stop=9)},
        "record": {"density": 0.25, "updates": smupar.record_updates},
        "observe": {"density": 0.25, "observe": True},
    }
    return SmuparCallback(base=lambda: MLP(32), **{**made[what], **settings})


def fit(what=None, *, steps=12, ckpt_path=None, configure="plain", **settings):
    torch.manual_seed(0)
    module, sparse = MLP(64, configure), callback(what, **settings)
    run = trainer(sparse, steps)
    run.fit(module, batches(), ckpt_path=ckpt_path)
    return module, sparse, run


def own_loop(steps=12):
    """The same without Lightning."""
    torch.manual_seed(0)
    module = MLP(64)
    plan = smupar.parameterize(module, base=MLP(32), density=0.25)
    optimizer = torch.optim.AdamW(smupar.param_groups(module, plan, lr=1e-2, weight_decay=0.1), betas=(0.9, 0.95))
    updates = smupar.record_updates(module, plan, optimizer)
    (batch,) = list(batches(1))
    for _ in range(steps):
        module.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer, updates.trace


def same(module, other):
    module, other = module.state_dict(), other.state_dict()
    return module.keys() == other.keys() and all(torch.equal(module[name], other[name]) for name in module)


def test_run_is_that_of_a_plain_loop():
    module, sparse, run = fit("record")
    plain, optimizer, trace = own_loop()
    assert same(module, plain)
    assert module.losses == plain.losses
    assert module.losses[-1] < 0.5 * module.losses[0]
    # Lightning runs the forward pass inside optimizer.step, where hooks before a step come too early.
    assert sparse.updates.trace == trace
    keys = ("name", "lr", "weight_decay", "betas", "lr_factor")
    assert [{key: group[key] for key in keys} for group in run.optimizers[0].param_groups] == [
        {key: group[key] for key in keys} for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("configure", ["plain", "watched"])
@pytest.mark.parametrize("what", ["RigL", "GMP", "record", "observe"])
def test_run_resumed_from_a_checkpoint_is_the_uninterrupted_one(what, configure, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an observation is written to the folder of the Trainer
    whole, sparse, _ = fit(what, configure=configure)
    _, _, half = fit(what, configure=configure, steps=6)
    half.save_checkpoint(tmp_path / "half.ckpt")
    rest, again, _ = fit(what, configure=configure, ckpt_path=tmp_path / "half.ckpt")
    assert same(whole, rest)
    mask = mask_of(rest, HIDDEN)
    assert int(mask.sum()) == mask.numel() // 4
    assert not rest.get_parameter(HIDDEN)[~mask].any()
    if what == "record":
        assert sparse.updates.trace == again.updates.trace
    elif what == "observe":
        assert Observation.load("observed.json").at == sparse.observer.observation.at == [1, 2, 3, 4, 6, 8, 11]
        assert again.observer.observation.sizes["dY"] == sparse.observer.observation.sizes["dY"]
    else:
        assert sparse.sparsifier.num_steps == again.sparsifier.num_steps == 12


def test_scheduler_sees_the_plans_groups():
    _, sparse, run = fit(configure="groups")
    rates = {group["lr_factor"]: group["lr"] for group in run.optimizers[0].param_groups}
    assert rates == pytest.approx({1.0: 1e-2 * 0.88, 2.0: 2e-2 * 0.88})  # 1 / (width 2 x density 1/4)
    assert sparse.plan[HIDDEN].lr_factor("adam") == 2


def test_accumulated_batches_count_as_one_step():
    sparse = callback("RigL")
    run = trainer(sparse, steps=5, accumulate_grad_batches=3)
    run.fit(MLP(64), batches(15))
    assert sparse.sparsifier.num_steps == run.global_step == 5


def test_plan_of_a_parameterized_module_is_taken():
    module = MLP(64)
    plan = smupar.parameterize(module, base=MLP(32), density=0.5)
    sparse = SmuparCallback(plan=plan)
    trainer(sparse, steps=2).fit(module, batches())
    assert sparse.plan is plan
    assert module.smupar is sparse


def test_prepare_is_called_with_module_and_plan():
    seen = []
    fit(steps=1, prepare=lambda module, plan: seen.append((type(module), plan.rule)))
    assert seen == [(MLP, "smupar")]


class ScaledInput(MLP):
    """Multiplies by a number that follows the width."""

    def __init__(self, width):
        super().__init__(width)
        self.scale = width**0.5

    def training_step(self, batch, number):
        return super().training_step((batch[0] * self.scale, batch[1]), number)


def test_open_reminder_stops_the_fit_until_it_is_settled():
    def fit_with(**settings):
        module = ScaledInput(64)
        trainer(SmuparCallback(base=lambda: ScaledInput(32), **settings), steps=2).fit(module, batches())
        return module

    with (
        pytest.warns(smupar.PlanWarning, match="not set yet: multipliers"),
        pytest.raises(ValueError, match=r"still asks for multipliers.*in prepare=.*: plan\.settle\('multipliers'\)"),
    ):
        fit_with()
    assert fit_with(prepare=lambda module, plan: plan.settle("multipliers")).scale == 8
    assert fit_with(multipliers="base").scale == pytest.approx(32**0.5)


def test_trained_module_is_tested_and_loaded_without_fit(tmp_path):
    module, _, run = fit("GMP")
    run.save_checkpoint(tmp_path / "last.ckpt")

    class Tested(MLP):
        def test_step(self, batch, number):
            self.logits = self.layers(batch[0])

    fresh = Tested(64)
    sparse = SmuparCallback(base=lambda: Tested(32), sparsifier=smupar.GMP)
    trainer(sparse).test(fresh, batches(1), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    ((inputs, _),) = list(batches(1))
    with torch.no_grad():
        assert torch.equal(fresh.logits, module.layers(inputs))
    assert is_parameterized(fresh)


# Bad input


class Late(MLP):
    """Has no layers before it is configured."""

    def __init__(self, width):
        lightning.LightningModule.__init__(self)

    def configure_model(self):
        self.layers = nn.Linear(8, 4)


LINE = r"AdamW\(self\.smupar\.param_groups\(lr=\.\.\., optimizer='adamw'\)\)"
REFUSED = {
    "scheduler over plain groups": (lambda: fit(configure="scheduler over plain groups"), LINE),
    "two groups": (lambda: fit(configure="two groups"), LINE),
    "pruning after a scheduler": (lambda: fit("GMP", configure="groups"), "make the scheduler afterwards"),
    "neither base nor plan": (SmuparCallback, "either base"),
    "both base and plan": (lambda: SmuparCallback(base=MLP(32), plan="plan"), "either base"),
    "plan and density": (lambda: SmuparCallback(plan="plan", density=0.5), "either base"),
    "plan of another module": (
        lambda: trainer(SmuparCallback(plan=smupar.make_plan(MLP(64), base=MLP(32)))).fit(MLP(64), batches()),
        "not parameterized",
    ),
    "no layers yet": (lambda: trainer(callback()).fit(Late(64), batches()), "build its layers in __init__"),
    "no optimizer": (lambda: fit(configure="none"), "no optimizer to train with"),
    "no plan before fit": (lambda: callback().plan, "no plan before"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_trained_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_missing_lightning_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "smupar.integrations.lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'smupar\[lightning\]'"):
        importlib.import_module("smupar.integrations.lightning")


def test_second_fit_measures_anew():
    torch.manual_seed(0)
    module, sparse = MLP(64), callback("record")
    traces = []
    for _ in range(2):
        trainer(sparse, 4).fit(module, batches())
        traces.append(sparse.updates.trace)
    assert [trace.num_steps for trace in traces] == [4, 4]
