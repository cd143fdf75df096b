"""Runs whose masks move and whose updates are measured: stopped and started, and what they leave."""

import functools
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import smupar
from smupar.cli.main import main
from smupar.lm.config.commands import ExportConfig, GenerateConfig
from smupar.lm.data.batches import open_text, read_batch
from smupar.lm.run.distributed import World
from smupar.lm.run.folder import read_config, read_summary
from smupar.lm.run.schedule import lr_share
from smupar.lm.run.step import Stepper
from smupar.lm.run.train import train
from smupar.lm.use.export import export
from smupar.lm.use.generate import generate
from smupar.lm.use.load import load_model, load_run
from smupar.model.attached import mask_of
from smupar.updates.observation import Observation
from smupar.updates.trace import Trace
from tests.lm.run.runs import CPU, HOW, assert_same_run, resumable, rows, stepper_of, tensors

KEEP_ALL = replace(HOW, keep=99)


@pytest.fixture(scope="module")
def proxy(config, tmp_path_factory):
    """Folder of a recorded run of the dense model of base width."""
    folder = tmp_path_factory.mktemp("proxy") / "run"
    dense = replace(config, model=replace(config.model, width=32), sparsity=0.0, record=True)
    train(dense, replace(KEEP_ALL, out=str(folder)))
    return folder


KINDS = {
    "plain": {},
    "record": {"record": True},
    "follow": {"follow": True},
    "rigl": {"dynamic": "rigl"},
    "set": {"dynamic": "set"},
    "gmp": {"dynamic": "gmp"},
    "gmp fixed": {"dynamic": "gmp", "correction": "fixed", "allocation": "erk"},
    "rigl, follow": {"dynamic": "rigl", "follow": True},
    "gmp, follow": {"dynamic": "gmp", "follow": True},
    "imp, follow": {"dynamic": "imp", "rounds": 2, "follow": True},
    "gmp, record, muon": {"dynamic": "gmp", "record": True, "optimizer": "muon", "lr": 0.02, "rest_lr": 2**-7},
}


MOVING = [kind for kind in KINDS if kind != "plain"]


@pytest.fixture(scope="module")
def finished(config, proxy, tmp_path_factory):
    """Configuration and folder of each kind of run, trained without a stop when first asked for."""
    root = tmp_path_factory.mktemp("finished")

    @functools.cache
    def run(kind):
        fields = dict(KINDS[kind])
        if "follow" in fields:
            fields["follow"] = str(proxy / "trace.json")
        made, folder = replace(config, **fields), root / kind
        train(made, replace(KEEP_ALL, out=str(folder)))
        return made, folder

    return run


@pytest.mark.parametrize("step", [3, 12])
@pytest.mark.parametrize("kind", MOVING)
def test_run_that_goes_on_from_a_checkpoint_ends_with_the_same_bits(finished, tmp_path, kind, step):
    config, reference = finished(kind)
    folder = resumable(reference, tmp_path / "run", step)
    train(config, replace(KEEP_ALL, out=str(folder)))
    assert_same_run(folder, reference)


@pytest.mark.parametrize("kind", ["rigl, follow", "gmp, follow"])
def test_run_that_is_told_to_stop_again_and_again_ends_with_the_same_bits(finished, tmp_path, kind):
    config, reference = finished(kind)
    folder = tmp_path / "run"
    old = signal.signal(signal.SIGTERM, lambda *_: None), signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(15))
    statuses = []
    try:
        while statuses[-1:] != ["finished"]:
            signal.setitimer(signal.ITIMER_REAL, 0.02 + 0.1 * len(statuses))
            statuses.append(train(config, replace(KEEP_ALL, out=str(folder))).status)
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip((signal.SIGTERM, signal.SIGALRM), old, strict=True):
            signal.signal(number, handler)
    assert set(statuses[:-1]) == {"terminated"}
    ours, theirs = tensors(folder, 30), tensors(reference, 30)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert (folder / "trace.json").read_text() == (reference / "trace.json").read_text()
    assert read_summary(folder).valid_loss == read_summary(reference).valid_loss


def test_masks_moved_and_learning_rates_followed(finished):
    """What is compared above is not one and the same run."""
    ends = {kind: read_summary(finished(kind)[1]).train_loss for kind in KINDS}
    assert ends["record"] == ends["plain"]  # recording changes nothing
    others = {kind: loss for kind, loss in ends.items() if kind != "record"}
    assert len(set(others.values())) == len(others)
    first, last = (tensors(finished("rigl")[1], step)["model/blocks.0.mlp.up.weight_mask"] for step in (3, 30))
    assert first.sum() == last.sum()
    assert not torch.equal(first, last)


def test_recorded_run_leaves_its_trace(finished):
    config, folder = finished("record")
    trace = Trace.load(folder / "trace.json")
    assert trace.num_steps == config.steps
    assert trace.at == [*range(20), 20, 25]
    assert trace.optimizer == "adamw"
    assert set(trace.effects) == {name.removeprefix("model/").removesuffix("_mask") for name in masks_in(folder)}
    assert all(len(values) == len(trace.at) and min(values) > 0 for values in trace.effects.values())
    assert not (finished("plain")[1] / "trace.json").exists()


def masks_in(folder):
    return [name for name in tensors(folder, 30) if name.endswith("_mask")]


def test_trace_of_a_run_is_that_of_the_library(finished, text):
    config, folder = finished("record")
    model, plan = smupar.lm.model.gpt.build(config)
    groups = smupar.param_groups(model, plan, lr=config.lr, eps_value=config.eps, weight_decay=config.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=config.betas)
    opened = open_text(config)
    with smupar.record_updates(model, plan, optimizer) as trace:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(step, config))
        for step in range(4):
            batch = read_batch(opened.train, seed=0, step=step, batch_size=4, seq_len=32)
            optimizer.zero_grad()
            smupar.lm.run.step.next_token_loss(model, batch).backward()
            optimizer.step()
            scheduler.step()
    theirs = Trace.load(folder / "trace.json")
    for name, effects in trace.effects.items():
        assert theirs.effects[name][:4] == pytest.approx(effects, rel=1e-4)


def test_following_run_does_more_nearly_what_the_proxy_did(finished, proxy, config, tmp_path):
    """Under a rule whose learning rate knows neither width nor density."""
    wanted = Trace.load(proxy / "trace.json").effects
    found = {}
    for name, follow in (("follow", str(proxy / "trace.json")), ("plain", None)):
        wrong = replace(config, rule="smupar-init-only", record=True, follow=follow, sparsity=0.9)
        train(wrong, replace(KEEP_ALL, out=str(tmp_path / name)))
        effects = Trace.load(tmp_path / name / "trace.json").effects
        found[name] = np.mean([np.abs(np.log(np.array(effects[key][10:]) / wanted[key][10:])) for key in wanted])
    assert found["follow"] < 0.4
    assert found["plain"] > 3 * found["follow"]


def test_followed_trace_is_kept_with_the_run(finished, proxy):
    config, folder = finished("follow")
    assert (folder / "followed.json").read_text() == (proxy / "trace.json").read_text()
    assert read_config(folder) == config
    assert Trace.load(folder / "trace.json").at == [*range(20), 20, 25]
    assert not (finished("record")[1] / "followed.json").exists()


def test_other_trace_under_the_same_name_is_refused(finished, proxy, tmp_path):
    config, reference = finished("follow")
    mine = tmp_path / "trace.json"
    shutil.copy(proxy / "trace.json", mine)
    config = replace(config, follow=str(mine))
    train(config, replace(KEEP_ALL, out=str(tmp_path / "run")))
    assert_same_run(tmp_path / "run", reference)
    folder = resumable(tmp_path / "run", tmp_path / "again", 12)
    trace = Trace.load(mine)
    trace.effects["blocks.0.mlp.up.weight"][3] *= 2
    trace.save(mine)
    with pytest.raises(ValueError, match=r"trace\.json is not the one that .* was started with, which is followed\.json"):
        train(config, replace(KEEP_ALL, out=str(folder)))
    assert not (folder / "summary.json").exists()
    shutil.copy(folder / "followed.json", mine)
    train(config, replace(KEEP_ALL, out=str(folder)))
    assert_same_run(folder, reference)


def test_trace_that_is_gone_with_its_copy_is_named(finished, proxy, tmp_path):
    config, reference = finished("follow")
    folder = resumable(reference, tmp_path / "run", 12)
    gone = replace(config, follow=str(tmp_path / "gone" / "trace.json"))
    (folder / "config.json").write_text(gone.to_json())
    (folder / "followed.json").unlink()
    with pytest.raises(ValueError, match=r"trace\.json cannot be read"):
        train(gone, replace(KEEP_ALL, out=str(folder)))


def test_finished_run_is_said_to_have_ended_though_its_trace_is_gone(finished, tmp_path, capsys):
    config, reference = finished("follow")
    folder = tmp_path / "run"
    shutil.copytree(reference, folder)
    gone = replace(config, follow=str(tmp_path / "gone" / "trace.json"))
    (folder / "config.json").write_text(gone.to_json())
    assert train(gone, replace(KEEP_ALL, out=str(folder))).status == "finished"
    assert "has ended already" in capsys.readouterr().err


def test_run_goes_on_when_its_trace_was_moved(finished, proxy, tmp_path):
    """A trace goes by its name, wherever it lies."""
    config, reference = finished("follow")
    folder = resumable(reference, tmp_path / "run", 12)
    shutil.copy(proxy / "trace.json", tmp_path / "trace.json")
    moved = replace(config, follow=str(tmp_path / "trace.json"))
    assert moved.id == config.id
    train(moved, replace(KEEP_ALL, out=str(folder)))
    assert_same_run(folder, reference)


@pytest.mark.parametrize("kind", ["missing", "damaged", "another model"])
def test_trace_that_cannot_be_followed_does_not_keep_the_folder(config, proxy, tmp_path, kind):
    file = tmp_path / "trace.json"
    if kind == "damaged":
        file.write_text((proxy / "trace.json").read_text()[:100])
    if kind == "another model":
        Trace(1, [0], {"encoder.weight": [1.0]}, {}, "adamw").save(file)
    message = {"missing": "cannot be read", "damaged": "is damaged", "another model": "another architecture"}[kind]
    with pytest.raises(ValueError, match=message):
        train(replace(config, follow=str(file)), replace(KEEP_ALL, out=str(tmp_path / "run")))
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_logged_learning_rate_is_the_scheduled_one(finished, kind):
    config, folder = finished(kind)
    for row in rows(folder):
        assert row["lr"] == config.lr * lr_share(row["step"] - 1, config)


def test_following_does_not_disturb_the_learning_rates_that_the_trainer_sets(config, proxy):
    follows = replace(config, follow=str(proxy / "trace.json"), dynamic="gmp")
    stepper = stepper_of(follows, open_text(config))
    for step in range(6):
        stepper.step(step)
        groups = [group for optimizer in stepper.optimizers for group in optimizer.param_groups]
        share = lr_share(step, config)
        for group in groups:
            assert group["lr"] == pytest.approx(config.lr * group["lr_factor"] * share, rel=1e-12)
            assert group["peak_lr"] == pytest.approx(config.lr * group["lr_factor"], rel=1e-12)
    assert stepper.companions.updates.rates.measured


@pytest.mark.parametrize("kind", ["gmp", "gmp fixed", "gmp, follow", "imp, follow", "rigl", "set"])
def test_sparsity_of_a_run_is_that_of_its_end(finished, kind):
    _, folder = finished(kind)
    saved = tensors(folder, 30)
    masks = {name: mask for name, mask in saved.items() if name.endswith("_mask")}
    kept, total = sum(int(mask.sum()) for mask in masks.values()), sum(mask.numel() for mask in masks.values())
    assert read_summary(folder).sparsity == pytest.approx(1 - kept / total, abs=1e-12)
    assert read_summary(folder).sparsity == pytest.approx(0.75, abs=1e-3)
    for name, mask in masks.items():
        assert not saved[name.removesuffix("_mask")][~mask].any()


def test_gmp_starts_dense(finished):
    _, folder = finished("gmp")
    assert all(tensors(folder, 3)[name].all() for name in masks_in(folder))


@pytest.mark.parametrize("kind", ["gmp", "rigl, follow"])
def test_run_with_moving_masks_is_loaded_as_it_ended(finished, kind):
    _, folder = finished(kind)
    run = load_run(folder)
    saved = tensors(folder, 30)
    names = [name.removeprefix("model/").removesuffix("_mask") for name in masks_in(folder)]
    assert names
    for name in names:
        assert torch.equal(mask_of(run.model, name), saved[f"model/{name}_mask"])
        assert torch.equal(run.model.get_parameter(name), saved[f"model/{name}"])


@pytest.mark.parametrize("storage", ["dense", "sparse"])
@pytest.mark.parametrize("kind", ["gmp", "rigl, follow"])
def test_run_with_moving_masks_is_exported_as_it_ended(finished, tmp_path, kind, storage):
    _, folder = finished(kind)
    run = load_run(folder)
    export(ExportConfig(str(folder), str(tmp_path / "out"), format=storage))
    tokens = torch.arange(64).view(2, 32) % 128
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path / "out")[0](tokens), run.model(tokens), rtol=1e-5, atol=1e-5)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    name = "blocks.0.mlp.up.weight"
    if storage == "sparse":
        assert len(stored[f"{name}.values"]) == int(mask_of(run.model, name).sum())
    else:
        assert not stored[name][~mask_of(run.model, name)].any()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "density of hidden weights | 0.25" in card


def test_text_is_generated_from_a_pruned_run(finished):
    _, folder = finished("gmp")
    assert len("".join(generate(GenerateConfig(str(folder), prompt="ab", tokens=10, device="cpu")))) > 2


def test_command_line_takes_the_flags(config, proxy, tmp_path, capsys):
    flags = (
        f"train --width 64 --depth 1 --vocab-size 128 --base-width 32 --sparsity 0.75 --steps 5 --batch-size 4 --seq-len 32 "
        f"--valid-batches 1 --data {config.data} --dynamic rigl --mask-every 2 --mask-stop 0.9 --drop-fraction 0.4 "
        f"--follow {proxy / 'trace.json'} --device cpu --out {tmp_path / 'run'}"
    )
    main(flags.split())
    capsys.readouterr()
    made = read_config(tmp_path / "run")
    assert (made.dynamic, made.mask_every, made.mask_stop, made.drop_fraction) == ("rigl", 2, 0.9, 0.4)
    assert (tmp_path / "run" / "trace.json").exists()


def test_id_of_a_run_does_not_depend_on_the_folder_of_its_trace(config):
    ids = {replace(config, follow=path).id for path in ("a/trace.json", "/b/c/trace.json", "trace.json")}
    assert len(ids) == 1
    assert replace(config, follow="other.json").id not in ids
    assert config.id not in ids


@pytest.mark.parametrize("dynamic", ["rigl", "set", "gmp"])
def test_dense_model_has_nothing_that_moves(config, dynamic):
    dense = replace(config, sparsity=0.0, dynamic=dynamic)
    stepper = stepper_of(dense, open_text(config))
    assert stepper.companions.sparsifier is None
    assert stepper.sparsities == [0]


def test_micro_batches_measure_the_last_of_them(config, proxy):
    """The update is that of the whole batch, so the effect differs by the tokens it is seen on."""
    opened = open_text(config)
    effects = []
    for micro_batch in (4, 2):
        how = replace(HOW, micro_batch=micro_batch)
        stepper = Stepper(replace(config, record=True), how, World(0, 1, CPU, "ddp"), opened)
        for step in range(3):
            stepper.step(step)
        effects.append(stepper.companions.updates.trace.effects)
    for name in effects[0]:
        assert effects[0][name] != effects[1][name]
        assert effects[0][name] == pytest.approx(effects[1][name], rel=0.25)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dynamic": "rigl", "pattern": "2:4"}, "masks that move are unstructured: --dynamic rigl needs --pattern random"),
        ({"dynamic": "gmp", "pattern": "block-4"}, "masks that move are unstructured"),
        ({"drop_fraction": 1.0}, r"drop_fraction must lie in \(0, 1\), got 1\.0"),
        ({"drop_fraction": 0.0}, r"drop_fraction must lie in \(0, 1\)"),
        ({"mask_stop": 1.5}, r"mask_stop must lie in \(0, 1\]"),
        ({"mask_every": 0}, "mask_every must be at least 1"),
        ({"mask_every": 1000, "dynamic": "set"}, "masks would never move: every 1000 steps, not after step"),
        ({"dynamic": "rigl", "mask_stop": 0.01}, "would stop moving before the first"),
        ({"dynamic": "prune"}, "dynamic must be one of none, rigl, set, gmp"),
        ({"correction": "none"}, "correction must be one of moment, fixed"),
    ],
)
def test_configuration_that_makes_no_sense_is_refused(config, fields, message):
    with pytest.raises(ValueError, match=message):
        replace(config, **fields)


def test_observed_run_goes_on_and_leaves_its_observation(config, tmp_path):
    how = replace(HOW, observe=True)
    whole = train(config, replace(how, out=str(tmp_path / "whole")))
    half = train(replace(config), replace(HOW, out=str(tmp_path / "plain")))
    assert whole.train_loss == half.train_loss
    seen = Observation.load(tmp_path / "whole" / "observed.json")
    assert seen.at == [1, 2, 3, 4, 6, 8, 11, 16, 23, 24, 30]
    folder = resumable(tmp_path / "whole", tmp_path / "rest", 27)
    train(config, replace(how, out=str(folder)))
    again = Observation.load(folder / "observed.json")
    assert again.at == seen.at
    assert again.sizes["dY"] == seen.sizes["dY"]
    assert main(["verify", str(folder)]) is None
    (folder / "observed.json").write_text("{}")
    with pytest.raises(SystemExit):
        main(["verify", str(folder)])


def test_run_that_is_observed_from_a_checkpoint_on_counts_its_steps(config, tmp_path):
    train(config, replace(HOW, out=str(tmp_path / "run")))
    folder = resumable(tmp_path / "run", tmp_path / "rest", 27)
    train(config, replace(HOW, out=str(folder), observe=True))
    assert Observation.load(folder / "observed.json").at == [30]


def test_share_of_zeros_counts_layers_that_stay_dense(config):
    """ERK leaves the smallest layer dense at this sparsity, so it has no mask."""
    run = replace(config, dynamic="set", allocation="erk", sparsity=0.2)
    stepper = stepper_of(run, open_text(run))
    assert {row.name for row in stepper.plan if row.role == "hidden" and row.density == 1}
    assert stepper.sparsities == pytest.approx([0.2], abs=1e-3)
