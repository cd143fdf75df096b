"""Runs whose masks move and whose updates are measured: the trainer, stacks and studies."""

import contextlib
import functools
import io
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import smupar
from smupar.cli.main import main
from smupar.lm.config.commands import ExportConfig, GenerateConfig
from smupar.lm.config.run import Execution, ModelConfig, RunConfig
from smupar.lm.data import batches as data
from smupar.lm.data.shards import TokenizerInfo, write_tokens
from smupar.lm.run.distributed import World
from smupar.lm.run.folder import read_config, read_summary
from smupar.lm.run.schedule import lr_share
from smupar.lm.run.stack import GPTStack, stack_key
from smupar.lm.run.step import Stepper
from smupar.lm.run.train import train
from smupar.lm.use.export import export
from smupar.lm.use.generate import generate
from smupar.lm.use.load import load_model, load_run
from smupar.model.parameterize import mask_of
from smupar.study.engines import execute
from smupar.study.report import write_report
from smupar.study.store import Study
from smupar.updates.trace import Trace

CPU = torch.device("cpu")
HOW = Execution(save_every=3, valid_every=10, log_every=2, keep=99, device="cpu", peak_tflops=0.1)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Words of a tiny language, so that there is something to learn."""
    folder = tmp_path_factory.mktemp("text") / "words"
    rng = np.random.default_rng(0)
    words = [rng.integers(97, 123, size=rng.integers(2, 7), dtype=np.uint8) for _ in range(50)]
    spaced = [np.append(words[i], np.uint8(32)) for i in rng.integers(50, size=20_000)]
    write_tokens(folder, np.concatenate(spaced), TokenizerInfo("bytes", 256, 0, "b"))
    return str(folder)


@pytest.fixture(scope="module")
def config(text):
    return RunConfig(
        model=ModelConfig(width=64, depth=1, vocab_size=128),
        base_width=32,
        sparsity=0.75,
        mask_every=4,
        mask_stop=0.7,
        steps=30,
        batch_size=4,
        seq_len=32,
        valid_batches=2,
        data=text,
    )


@pytest.fixture(scope="module")
def proxy(config, tmp_path_factory):
    """Folder of a recorded run of the dense model of base width."""
    folder = tmp_path_factory.mktemp("proxy") / "run"
    dense = replace(config, model=replace(config.model, width=32), sparsity=0.0, record=True)
    train(dense, replace(HOW, out=str(folder)))
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
        train(made, replace(HOW, out=str(folder)))
        return made, folder

    return run


def resumable(folder, copied, step):
    """The run as it was when the checkpoint of a step was its last."""
    shutil.copytree(folder, copied)
    for file in ("summary.json", "trace.json"):
        (copied / file).unlink(missing_ok=True)
    for path in (copied / "checkpoints").iterdir():
        if int(path.name[-8:]) > step:
            shutil.rmtree(path)
    return copied


def tensors(folder, step):
    path = folder / "checkpoints" / f"step-{step:08d}"
    files = [(part, file) for part in ("model", "optimizer") for file in (path / part).glob("*.safetensors")]
    return {f"{part}/{name}": tensor for part, file in files for name, tensor in load_file(file).items()}


def rows(folder):
    """Metrics, without the speed."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in lines]


def assert_same_run(folder, reference, steps=30):
    ours, theirs = tensors(folder, steps), tensors(reference, steps)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    a, b = read_summary(folder), read_summary(reference)
    names = ("status", "train_loss", "valid_loss", "best_step", "sparsity")
    assert [getattr(a, name) for name in names] == [getattr(b, name) for name in names]
    assert a.status == "finished"
    assert rows(folder) == rows(reference)
    assert (folder / "trace.json").exists() == (reference / "trace.json").exists()
    if (reference / "trace.json").exists():
        assert (folder / "trace.json").read_text() == (reference / "trace.json").read_text()


# Stopped and started again


@pytest.mark.parametrize("step", [3, 12])
@pytest.mark.parametrize("kind", MOVING)
def test_run_that_goes_on_from_a_checkpoint_ends_with_the_same_bits(finished, tmp_path, kind, step):
    config, reference = finished(kind)
    folder = resumable(reference, tmp_path / "run", step)
    train(config, replace(HOW, out=str(folder)))
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
            statuses.append(train(config, replace(HOW, out=str(folder))).status)
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


# What a run leaves


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
    opened = data.open_text(config)
    with smupar.record_updates(model, plan, optimizer) as trace:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(step, config))
        for step in range(4):
            batch = data.batch(opened.train, seed=0, step=step, batch_size=4, seq_len=32)
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
        train(wrong, replace(HOW, out=str(tmp_path / name)))
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
    train(config, replace(HOW, out=str(tmp_path / "run")))
    assert_same_run(tmp_path / "run", reference)
    folder = resumable(tmp_path / "run", tmp_path / "again", 12)
    trace = Trace.load(mine)
    trace.effects["blocks.0.mlp.up.weight"][3] *= 2
    trace.save(mine)
    with pytest.raises(ValueError, match=r"trace\.json is not the one that .* was started with, which is followed\.json"):
        train(config, replace(HOW, out=str(folder)))
    assert not (folder / "summary.json").exists()
    shutil.copy(folder / "followed.json", mine)
    train(config, replace(HOW, out=str(folder)))
    assert_same_run(folder, reference)


def test_trace_that_is_gone_with_its_copy_is_named(finished, proxy, tmp_path):
    config, reference = finished("follow")
    folder = resumable(reference, tmp_path / "run", 12)
    gone = replace(config, follow=str(tmp_path / "gone" / "trace.json"))
    (folder / "config.json").write_text(gone.to_json())
    (folder / "followed.json").unlink()
    with pytest.raises(ValueError, match=r"the trace .*trace\.json cannot be read"):
        train(gone, replace(HOW, out=str(folder)))


def test_finished_run_is_said_to_have_ended_though_its_trace_is_gone(finished, tmp_path, capsys):
    config, reference = finished("follow")
    folder = tmp_path / "run"
    shutil.copytree(reference, folder)
    gone = replace(config, follow=str(tmp_path / "gone" / "trace.json"))
    (folder / "config.json").write_text(gone.to_json())
    assert train(gone, replace(HOW, out=str(folder))).status == "finished"
    assert "has ended already" in capsys.readouterr().out


def test_run_goes_on_when_its_trace_was_moved(finished, proxy, tmp_path):
    """A trace goes by its name, wherever it lies."""
    config, reference = finished("follow")
    folder = resumable(reference, tmp_path / "run", 12)
    shutil.copy(proxy / "trace.json", tmp_path / "trace.json")
    moved = replace(config, follow=str(tmp_path / "trace.json"))
    assert moved.id == config.id
    train(moved, replace(HOW, out=str(folder)))
    assert_same_run(folder, reference)


@pytest.mark.parametrize("kind", ["missing", "damaged", "another model"])
def test_trace_that_cannot_be_followed_does_not_keep_the_folder(config, proxy, tmp_path, kind):
    file = tmp_path / "trace.json"
    if kind == "damaged":
        file.write_text((proxy / "trace.json").read_text()[:100])
    if kind == "another model":
        Trace(1, [0], {"encoder.weight": [1.0]}, {}, "adamw").save(file)
    message = {"missing": "cannot be read", "damaged": "is no trace", "another model": "another architecture"}[kind]
    with pytest.raises(ValueError, match=message):
        train(replace(config, follow=str(file)), replace(HOW, out=str(tmp_path / "run")))
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_logged_learning_rate_is_the_scheduled_one(finished, kind):
    config, folder = finished(kind)
    for row in rows(folder):
        assert row["lr"] == config.lr * lr_share(row["step"] - 1, config)


def test_following_does_not_disturb_the_learning_rates_that_the_trainer_sets(config, proxy):
    follows = replace(config, follow=str(proxy / "trace.json"), dynamic="gmp")
    stepper = Stepper(follows, HOW, World(0, 1, CPU, "ddp"), data.open_text(config))
    for step in range(6):
        stepper.step(step)
        groups = [group for optimizer in stepper.optimizers for group in optimizer.param_groups]
        share = lr_share(step, config)
        for group in groups:
            assert group["lr"] == pytest.approx(config.lr * group["lr_factor"] * share, rel=1e-12)
            assert group["peak_lr"] == pytest.approx(config.lr * group["lr_factor"], rel=1e-12)
    assert stepper.updates.rates.measured


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
    with pytest.raises(SystemExit) as ended:
        main(flags.split())
    assert ended.value.code == 0
    capsys.readouterr()
    made = read_config(tmp_path / "run")
    assert (made.dynamic, made.mask_every, made.mask_stop, made.drop_fraction) == ("rigl", 2, 0.9, 0.4)
    assert (tmp_path / "run" / "trace.json").exists()


# Configurations


def test_id_of_a_run_does_not_depend_on_the_folder_of_its_trace(config):
    ids = {replace(config, follow=path).id for path in ("a/trace.json", "/b/c/trace.json", "trace.json")}
    assert len(ids) == 1
    assert replace(config, follow="other.json").id not in ids
    assert config.id not in ids


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dynamic": "rigl", "pattern": "2:4"}, "masks that move are unstructured: --dynamic rigl needs --pattern random"),
        ({"dynamic": "gmp", "pattern": "block-4"}, "masks that move are unstructured"),
        ({"drop_fraction": 1.0}, r"drop_fraction must lie in \(0, 1\), got 1\.0"),
        ({"drop_fraction": 0.0}, r"drop_fraction must lie in \(0, 1\)"),
        ({"mask_stop": 1.5}, r"mask_stop must lie in \(0, 1\]"),
        ({"mask_every": 0}, "mask_every from 1 on"),
        ({"mask_every": 1000, "dynamic": "set"}, "masks would never move: every 1000 steps, not after step"),
        ({"dynamic": "rigl", "mask_stop": 0.01}, "would stop moving before its first"),
        ({"dynamic": "prune"}, "dynamic must be one of none, rigl, set, gmp"),
        ({"correction": "none"}, "correction must be one of moment, fixed"),
    ],
)
def test_configuration_that_makes_no_sense_is_refused(config, fields, message):
    with pytest.raises(ValueError, match=message):
        replace(config, **fields)


@pytest.mark.parametrize("dynamic", ["rigl", "set", "gmp"])
def test_dense_model_has_nothing_that_moves(config, dynamic):
    dense = replace(config, sparsity=0.0, dynamic=dynamic)
    stepper = Stepper(dense, HOW, World(0, 1, CPU, "ddp"), data.open_text(config))
    assert stepper.sparsifier is None
    assert stepper.sparsities == [0]


def test_micro_batches_measure_the_last_of_them(config, proxy):
    """The update is that of the whole batch, so the effect differs by the tokens it is seen on."""
    opened = data.open_text(config)
    effects = []
    for micro_batch in (4, 2):
        how = replace(HOW, micro_batch=micro_batch)
        stepper = Stepper(replace(config, record=True), how, World(0, 1, CPU, "ddp"), opened)
        for step in range(3):
            stepper.step(step)
        effects.append(stepper.updates.trace.effects)
    for name in effects[0]:
        assert effects[0][name] != effects[1][name]
        assert effects[0][name] == pytest.approx(effects[1][name], rel=0.25)


# Stacks

STACKED = RunConfig(
    model=ModelConfig(width=64, depth=2, head_dim=32),
    base_width=32,
    sparsity=0.75,
    lr=2**-7,
    steps=40,
    seq_len=32,
    batch_size=4,
    mask_every=8,
    valid_batches=1,
)


def stepper_of(config, text):
    return Stepper(config, Execution(device="cpu"), World(0, 1, CPU, "ddp"), text)


def losses_of(steps, num=None):
    return torch.tensor([steps.step(number).item() for number in range(num or steps.config.steps)])


@pytest.fixture(scope="module")
def library():
    """The text of Python's standard library."""
    return data.open_text(STACKED)


@pytest.fixture(scope="module")
def traces(library, tmp_path_factory):
    """File of the trace of the dense model of base width, by optimizer."""
    folder = tmp_path_factory.mktemp("traces")

    @functools.cache
    def file(**fields):
        config = replace(STACKED, model=replace(STACKED.model, width=32), sparsity=0.0, record=True, **fields)
        stepper = stepper_of(config, library)
        losses_of(stepper)
        path = folder / f"{config.id}.json"
        stepper.updates.trace.save(path)
        return str(path)

    return file


def assert_stack_is_one_by_one(bag, library, *, tolerance, steps=40, trace_tolerance=None, mask_tolerance=1e-4):
    stack = GPTStack(bag, library, CPU)
    losses = torch.stack([stack.step(number) for number in range(steps)])
    for index, config in enumerate(bag):
        alone = stepper_of(config, library)
        expected = losses_of(alone, steps)
        assert (losses[:, index] / expected - 1).abs().max() < tolerance, config
        assert stack.sparsities[index] == pytest.approx(alone.sparsities[0], abs=1e-6)
        different = num = 0
        for name in stack.stack.hidden:
            mask, ours = mask_of(alone.model, name), stack.stack.tensors.masks[name][index]
            different += int((ours ^ (torch.ones_like(ours) if mask is None else mask)).sum())
            num += ours.numel()
        assert different < mask_tolerance * num, config  # weights that are equal but for a rounding may change places
        if alone.updates is not None:
            trace = stack.traces()[index]
            assert trace.at == alone.updates.trace.at
            assert trace.optimizer == alone.updates.trace.optimizer
            assert trace.shapes == alone.updates.trace.shapes
            for name, effects in alone.updates.trace.effects.items():
                assert trace.effects[name] == pytest.approx(effects, rel=trace_tolerance or tolerance)
    return stack, losses


def mixed_bag(trace):
    return [
        replace(STACKED, follow=trace),
        replace(STACKED, dynamic="rigl"),
        replace(STACKED, dynamic="set", seed=1),
        replace(STACKED, dynamic="gmp"),
        replace(STACKED, dynamic="gmp", correction="fixed"),
        replace(STACKED, dynamic="rigl", follow=trace, sparsity=0.9),
        replace(STACKED, dynamic="gmp", follow=trace, allocation="erk"),
        STACKED,
    ]


def test_mixed_bag_that_moves_gives_losses_masks_and_traces_of_single_runs(traces, library):
    bag = mixed_bag(traces())
    assert len({stack_key(config) for config in bag}) == 1
    stack, losses = assert_stack_is_one_by_one(bag, library, tolerance=1e-4, trace_tolerance=1e-3)
    assert len({round(loss, 6) for loss in losses[-1].tolist()}) == len(bag)
    stack.refill(list(reversed(bag)))
    again = torch.stack([stack.step(number) for number in range(12)])
    torch.testing.assert_close(again.flip(1), losses[:12], rtol=1e-6, atol=0)
    assert [trace.at for trace in stack.traces()] == [list(range(12))] * len(bag)


@pytest.mark.parametrize(
    ("fields", "steps", "tolerance"),
    [
        ({"optimizer": "lion", "lr": 2**-10, "weight_decay": 1.0}, 16, 1e-3),
        ({"optimizer": "sgd", "lr": 0.1, "rest_lr": 2**-8}, 16, 1e-3),
        ({"optimizer": "muon", "lr": 0.005, "rest_lr": 2**-8, "weight_decay": 1.0}, 8, 0.02),  # its products are in bf16
        ({"optimizer": "adam", "weight_decay": 0.1}, 16, 1e-3),
        ({"weight_decay": 1.0, "clip": 0.5}, 16, 1e-3),
    ],
    ids=["lion", "sgd", "muon", "adam", "adamw"],
)
def test_every_optimizer_follows_in_a_stack_as_alone(traces, library, fields, steps, tolerance):
    shared = replace(STACKED, **fields, steps=steps)
    trace = traces(**{name: value for name, value in fields.items() if name != "clip"})
    bag = [replace(shared, follow=trace), replace(shared, follow=trace, dynamic="gmp", sparsity=0.9), shared]
    assert_stack_is_one_by_one(
        bag, library, tolerance=1e-3, steps=steps, trace_tolerance=tolerance, mask_tolerance=max(1e-4, tolerance / 2)
    )


def test_rounds_of_imp_in_a_stack_are_those_of_single_runs(traces, library):
    imp = replace(STACKED, dynamic="imp", rounds=3, steps=24)
    bag = [imp, replace(imp, correction="fixed"), replace(imp, follow=traces())]
    assert_stack_is_one_by_one(bag, library, tolerance=1e-4, steps=24, trace_tolerance=1e-3)


def test_rounds_of_imp_with_the_last_density_follow_in_a_stack_as_alone(traces, library):
    imp = replace(STACKED, dynamic="imp", rounds=3, steps=24, correction="fixed", follow=traces())
    assert_stack_is_one_by_one([imp, replace(imp, seed=1)], library, tolerance=1e-4, steps=24, trace_tolerance=1e-3)


def test_rounds_of_imp_are_recorded_in_a_stack_as_alone(library):
    imp = replace(STACKED, dynamic="imp", rounds=1, steps=50, record=True)
    assert_stack_is_one_by_one([imp], library, tolerance=1e-4, steps=50, trace_tolerance=1e-3)


def test_adamw_with_a_rate_of_its_own_for_the_rest_follows(traces, library):
    follows = replace(STACKED, rest_lr=2**-8, steps=6, follow=traces())
    assert_stack_is_one_by_one([follows], library, tolerance=1e-5, steps=6, trace_tolerance=1e-3)


def test_stack_of_one_records_as_the_trainer(library):
    config = replace(STACKED, record=True, steps=8)
    assert_stack_is_one_by_one([config], library, tolerance=1e-5, steps=8, trace_tolerance=1e-3)


def test_run_that_diverges_in_a_stack_says_so_in_its_trace_and_hurts_nobody(library):
    calm = replace(STACKED, optimizer="sgd", lr=0.05, record=True, steps=6)
    stack = GPTStack([calm, replace(calm, lr=1e12)], library, CPU)
    for number in range(6):
        stack.step(number)
    calm_trace, wild_trace = stack.traces()
    assert wild_trace.diverged
    assert not calm_trace.diverged
    alone = stepper_of(calm, library)
    losses_of(alone)
    for name, effects in alone.updates.trace.effects.items():
        assert calm_trace.effects[name] == pytest.approx(effects, rel=1e-3)


# Studies

TINY = RunConfig(
    model=ModelConfig(width=32, depth=1, head_dim=16), base_width=32, steps=20, batch_size=2, seq_len=16, valid_batches=1
)
FLAGS = (
    "--depth 1 --head-dim 16 --base-width 32 --steps 20 --batch-size 2 --seq-len 16 --widths 64 --device cpu "
    "--values 0.002 0.008 0.03 "
)
MEASURED = FLAGS + "--rules smupar measured --sparsities 0 0.75 "


def run_transfer(folder, flags=MEASURED, engine="stacked"):
    """What `smupar transfer` finds, in a sentence."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main(f"transfer {flags} --engine {engine} --out {folder}".split())
    return said.getvalue().splitlines()[-2]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured") / "study"
    return folder, run_transfer(folder)


def stamps(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.glob("runs/**/*") if path.is_file()}


def test_measured_runs_of_a_study_follow_the_best_run_of_the_proxy(study):
    folder, found = study
    results = Study(folder).results()
    proxies = [one for one in results if one.config.record]
    assert {one.config.lr for one in proxies} == {0.002, 0.008, 0.03}
    assert {one.config.model.width for one in proxies} == {32}
    assert all((folder / "runs" / one.config.id / "trace.json").exists() for one in proxies)
    best = min(proxies, key=lambda one: one.loss)
    (trace,) = folder.glob("*.trace.json")
    assert trace.read_text() == (folder / "runs" / best.config.id / "trace.json").read_text()
    followers = [one for one in results if one.config.follow]
    assert len(followers) == 2 * 3
    assert {Path(one.config.follow).name for one in followers} == {trace.name}
    assert {one.config.rule for one in followers} == {"smupar"}
    assert "measured updates" in found


def test_measured_runs_are_those_of_the_trainer(study, tmp_path):
    folder, _ = study
    result = next(one for one in Study(folder).results() if one.config.follow and one.config.sparsity == 0.75)
    summary = train(result.config, Execution(out=str(tmp_path / "run"), device="cpu", peak_tflops=0.1))
    assert summary.train_loss == pytest.approx(result.loss, rel=1e-4)
    ours, theirs = (Trace.load(path / "trace.json") for path in (tmp_path / "run", folder / "runs" / result.config.id))
    assert ours.at == theirs.at
    for name, effects in ours.effects.items():
        assert theirs.effects[name] == pytest.approx(effects, rel=1e-2)


def test_study_started_again_runs_nothing(study):
    folder, found = study
    before = stamps(folder)
    assert run_transfer(folder) == found
    assert stamps(folder) == before
    assert len(list(folder.glob("*.trace.json"))) == 1


def test_moved_study_is_reported_and_goes_on(study, tmp_path):
    folder, found = study
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    assert write_report(Study(moved)).splitlines()[0] == found
    before = stamps(moved)
    assert run_transfer(moved) == found
    assert stamps(moved) == before


def test_reading_a_study_writes_no_trace(study, tmp_path):
    folder, found = study
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    for trace in moved.glob("*.trace.json"):
        trace.unlink()
    assert write_report(Study(moved)).splitlines()[0] == found
    assert not list(moved.glob("*.trace.json"))


def test_study_that_lost_a_measured_run_runs_that_alone(study, tmp_path):
    folder, found = study
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    lost = next(one.config for one in Study(moved).results() if one.config.follow)
    shutil.rmtree(moved / "runs" / lost.id)
    before = stamps(moved)
    assert run_transfer(moved) == found
    assert {path: stamp for path, stamp in stamps(moved).items() if lost.id not in path.parts} == before
    assert (moved / "runs" / lost.id / "summary.json").exists()


def test_serial_engine_gives_the_same_study(study, tmp_path):
    run_transfer(tmp_path / "study", FLAGS + "--rules measured --sparsities 0.75", engine="serial")
    theirs = {
        (one.config.lr, one.config.sparsity, bool(one.config.follow)): one.loss
        for one in Study(study[0]).results()
        if one.config.rule == "smupar"
    }
    ours = [one for one in Study(tmp_path / "study").results() if one.config.follow]
    assert len(ours) == 3
    for one in ours:
        assert one.loss == pytest.approx(theirs[one.config.lr, one.config.sparsity, True], rel=1e-4)


def test_transfer_with_gmp_compares_the_density_of_the_moment_with_the_paper(tmp_path):
    flags = FLAGS + "--rules smupar moment measured --sparsities 0.75 --dynamic gmp --mask-every 4"
    found = run_transfer(tmp_path / "study", flags)
    results = Study(tmp_path / "study").results()
    targets = [one for one in results if one.config.model.width == 64]
    assert len(targets) == 9
    assert all(one.config.dynamic == "gmp" and one.summary.sparsity == pytest.approx(0.75, abs=1e-3) for one in targets)
    by_rule = {(one.config.correction, bool(one.config.follow)) for one in targets}
    assert by_rule == {("fixed", False), ("moment", False), ("moment", True)}
    assert len({one.loss for one in targets}) == 9
    assert "density of the moment" in found
    assert all(one.config.dynamic == "none" for one in results if one.config.model.width == 32)


def test_optimizer_that_cannot_be_stacked_is_measured_by_the_trainer(tmp_path):
    flags = FLAGS.replace("--steps 20", "--steps 6") + "--rules measured --sparsities 0.75 --optimizer nadam"
    assert "measured updates" in run_transfer(tmp_path / "study", flags)
    followers = [one for one in Study(tmp_path / "study").results() if one.config.follow]
    assert len(followers) == 3


def test_proxy_may_be_shorter_and_shallower_than_what_follows_it(tmp_path):
    flags = FLAGS.replace("--depth 1", "--depth 3") + "--rules measured --sparsities 0.75 --proxy-depth 2 --proxy-steps 10"
    run_transfer(tmp_path / "study", flags)
    results = Study(tmp_path / "study").results()
    assert {(one.config.model.depth, one.config.steps, one.config.record) for one in results} == {
        (2, 10, True),
        (3, 20, False),
    }
    follower = next(one.config for one in results if one.config.follow)
    proxy = Trace.load(next((tmp_path / "study").glob("*.trace.json")))
    assert proxy.num_steps == 10
    assert len(proxy.effects) == 2 * 5
    assert len(Trace.load(tmp_path / "study" / "runs" / follower.id / "trace.json").effects) == 3 * 5


def test_study_in_which_the_proxy_diverges_says_so(tmp_path, capsys):
    flags = FLAGS.replace("0.002 0.008 0.03", "1e11 1e12 1e13") + "--rules measured --sparsities 0.5 --optimizer sgd"
    with pytest.raises(SystemExit) as ended:
        main(f"transfer {flags} --engine stacked --out {tmp_path / 'study'}".split())
    assert ended.value.code == 2
    assert "diverged: sweep smaller values of lr" in capsys.readouterr().err


def test_sweep_over_dynamic_methods_runs_as_one_stack(tmp_path):
    configs = [replace(TINY, sparsity=0.75, dynamic=dynamic, mask_every=4) for dynamic in ("none", "rigl", "set", "gmp")]
    with Study.open(tmp_path / "study", {"kind": "sweep", "axes": {}}, "smupar sweep") as study:
        execute(study, configs, engine="stacked", device="cpu")
        study.write_table()
    results = study.results(configs)
    assert [one.summary.sparsity for one in results] == pytest.approx([0.75] * 4, abs=1e-3)
    assert len({one.loss for one in results}) == 4
