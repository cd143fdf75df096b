"""What was typed becomes a configuration: without argv."""

import dataclasses
import json
import pickle
from dataclasses import replace

import pytest

from smupar.cli.main import parse
from smupar.cli.resolve import Request, resolve, resolve_training, start
from smupar.lm.config.fields import changed
from smupar.lm.config.presets import PRESETS, TABLE_3, preset
from smupar.lm.config.run_config import LATER_FIELDS, ModelConfig, RunConfig
from smupar.lm.config.run_id import FIRST_FIELDS
from smupar.study.config import TransferConfig, TuneConfig

HPS = {"lr": 0.01, "init_std": 0.1, "alpha_input": 9.0, "alpha_output": 1.0, "base_width": 32}


def test_without_flags_a_run_is_its_preset():
    for name in PRESETS:
        assert resolve(RunConfig, Request(preset=name)) == start(RunConfig, Request(preset=name)) == preset(name)


def test_flags_win_over_tuned_values_and_these_over_the_preset():
    request = Request({"lr": 0.5, "width": 1024}, "paper-610m", hps={**HPS, "base_width": 128})
    run = resolve(RunConfig, request)
    assert (run.lr, run.init_std, run.base_width, run.model.width) == (0.5, 0.1, 128, 1024)
    assert run.steps == preset("paper-610m").steps
    before = start(RunConfig, request)
    assert (before.lr, before.model.width) == (0.01, 2048)


@pytest.mark.parametrize(("width", "lr"), [(1088, 6e-4), (2176, 2e-4)])
def test_preset_is_that_of_the_rule_and_width(width, lr):
    run = resolve(RunConfig, Request({"rule": "sp", "width": width}, "paper-iso"))
    assert (run.rule, run.model.width, run.lr, run.init_std) == ("sp", width, lr, 0.02)
    assert resolve(RunConfig, Request({"width": width}, "paper-iso")).lr == TABLE_3["lr"]


def test_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="no preset is called 'huge': choose one of demo, 610m, paper-610m, paper-iso"):
        resolve(RunConfig, Request(preset="huge"))


@pytest.mark.parametrize(
    ("needed", "typed", "size"), [(0, {}, 256), (256, {}, 256), (1000, {}, 1024), (1000, {"vocab_size": 2000}, 2000)]
)
def test_vocabulary_is_that_of_the_text_unless_typed(needed, typed, size):
    assert resolve(RunConfig, Request(typed, vocab_size=needed)).model.vocab_size == size


def test_tuned_values_are_for_their_base_width():
    with pytest.raises(ValueError, match=r"best\.json was tuned at --base-width 32, not 64: leave the flag out"):
        resolve(RunConfig, Request({"base_width": 64}, hps=HPS, hps_file="best.json"))
    assert resolve(RunConfig, Request({"base_width": 32}, hps=HPS)).lr == 0.01


def test_tuned_values_of_small_heads_need_the_flag_of_the_heads():
    request = Request({"head_dim": 8}, hps={**HPS, "base_width": 8})
    assert resolve_training(request) == resolve(RunConfig, request)
    assert resolve_training(request).base_width == 8


def test_study_of_the_demo_is_shorter_than_its_training():
    study = resolve(TransferConfig, Request({"sparsities": (0.5,), "depth": 3}))
    assert (study.run.steps, study.run.valid_batches, study.run.model.depth, study.sparsities) == (200, 1, 3, (0.5,))
    assert resolve(TransferConfig, Request({"steps": 30}, hps=HPS)).run.steps == 30


@pytest.mark.parametrize("kind", [TransferConfig, TuneConfig])
def test_study_without_flags_is_the_default_of_its_class(kind):
    assert resolve(kind, Request()) == kind().normalised


def test_proxy_of_a_search_is_dense_and_as_wide_as_its_base():
    assert resolve(TuneConfig, Request()).run.model.width == 64
    run = resolve(TuneConfig, Request({"base_width": 40, "head_dim": 8})).run
    assert (run.model.width, run.base_width, run.sparsity) == (40, 40, 0.0)
    assert resolve(TuneConfig, Request({"base_width": 32, "width": 64})).run.model.width == 64


SET_BY_TRANSFER = {
    "width": "name the targets' widths with --widths",
    "sparsity": "",
    "rule": "name the rules to compare with --rules",
    "correction": "",
    "follow": ".*recorded and followed by --rules measured",
    "record": "",
    "lr": "it is the swept field, give its values with --values",
}


@pytest.mark.parametrize(("name", "remedy"), SET_BY_TRANSFER.items(), ids=SET_BY_TRANSFER)
def test_what_transfer_sets_itself_is_refused(name, remedy):
    with pytest.raises(ValueError, match=f"transfer does not take --{name}: {remedy}"):
        resolve(TransferConfig, Request({name: getattr(RunConfig(), name, 64)}))


def test_swept_axis_is_refused_by_its_flag():
    with pytest.raises(ValueError, match="transfer does not take --init-std: it is the swept field, give its values with"):
        resolve(TransferConfig, Request({"axis": "init_std", "init_std": 0.1}))
    assert resolve(TransferConfig, Request({"axis": "init_std", "lr": 0.1})).run.lr == 0.1


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({"momentum": 0.5}, "--momentum does nothing with --optimizer adamw: it is for sgd, muon"),
        (
            {"betas": (0.5, 0.5), "optimizer": "SGD"},
            "--betas does nothing with --optimizer sgd: it is for adamw, adam, adamax, nadam, radam, lion, muon",
        ),
        ({"context": 64}, "--context does nothing with --positions alibi: it is for learned"),
        ({"mask_every": 10}, "--mask-every does nothing with --dynamic none: it is for rigl, set, gmp"),
        ({"rounds": 2, "dynamic": "gmp"}, "--rounds does nothing with --dynamic gmp: it is for imp"),
        ({"correction": "fixed", "dynamic": "rigl"}, "--correction does nothing with --dynamic rigl: it is for gmp, imp"),
    ],
)
def test_flags_that_do_nothing_are_refused(typed, message):
    with pytest.raises(ValueError, match=message):
        resolve_training(Request(typed))
    resolve(RunConfig, Request(typed))  # a plan does not mind


def test_flags_that_do_something_are_not_refused():
    assert resolve_training(Request({"momentum": 0.5, "optimizer": "sgd"})).momentum == 0.5
    assert resolve_training(Request({"betas": (0.5, 0.5), "optimizer": "sgd", "rest_lr": 0.1})).rest_lr == 0.1  # AdamW beside
    assert resolve_training(Request({"context": 64, "positions": "learned"})).model.context == 64


def test_machine_is_for_dry_runs():
    with pytest.raises(ValueError, match=r"--gpu-gib only changes the estimate of --dry-run\. To train on several"):
        resolve_training(Request(), machine={"gpu_gib": 80.0})
    resolve_training(Request(), dry_run=True, machine={"gpu_gib": 80.0})


def test_resolved_configurations_are_normalised():
    typed = {"data": "text/", "pattern": "1:3", "sparsity": 0.667, "width": 96}
    run = resolve(RunConfig, Request(typed))
    assert (run.data, run.sparsity) == ("text", 1 - 1 / 3)
    assert resolve(TuneConfig, Request({"data": "text/"})).run.data == "text"
    assert resolve(TransferConfig, Request({"rules": ("sp", "sp")})).rules == ("sp",)


def test_parsing_keeps_what_was_typed_and_nothing_else():
    call = parse(["train", "610m", "--width", "512", "--no_tied", "--betas", "0.5", "0.6", "--out", "x"]).run
    assert call.args == ("610m",)
    assert call.keywords["config"] == {"width": 512, "tied": False, "betas": (0.5, 0.6)}
    assert (call.keywords["how"], call.keywords["machine"]) == ({"out": "x"}, {})


# Ids


def test_construction_changes_nothing_and_ids_do_not_depend_on_spelling():
    run = RunConfig(model=ModelConfig(width=96), data="text/", valid_data="more/", pattern="1:3", sparsity=0.667)
    assert (run.data, run.valid_data, run.sparsity) == ("text/", "more/", 0.667)
    assert run.density == 1 - (1 - 1 / 3)
    same = RunConfig(model=ModelConfig(width=96), data="text", valid_data="more", pattern="1:3", sparsity=1 - 1 / 3)
    assert run.normalised == RunConfig.from_json(run.to_json()) == same
    assert run.id == same.id != RunConfig().id


def test_ids_are_those_of_the_first_published_runs():
    assert RunConfig(weight_decay=0.0).id == "1b4afcf6e6"
    assert replace(preset("paper-610m"), weight_decay=0.0, clip=None).id == "b6b963b776"
    assert replace(RunConfig(), follow="a/trace.json").id == replace(RunConfig(), follow="b/trace.json").id


def test_list_of_hashed_fields_is_frozen():
    names = {item.name for kind in (ModelConfig, RunConfig) for item in dataclasses.fields(kind)}
    assert len(FIRST_FIELDS) == 49
    assert names == FIRST_FIELDS | set(LATER_FIELDS)


def _with_a_field(kind):
    return dataclasses.make_dataclass("Later", [("dummy", int, 7)], bases=(kind,), frozen=True)


def test_later_field_enters_the_id_only_where_it_is_not_the_default():
    run = RunConfig(sparsity=0.5)
    later, model = _with_a_field(RunConfig), _with_a_field(ModelConfig)
    assert later(sparsity=0.5).id == later(sparsity=0.5, model=model()).id == run.id
    ids = {run.id, later(sparsity=0.5, dummy=8).id, later(sparsity=0.5, model=model(dummy=8)).id}
    assert len(ids) == 3


def test_configuration_without_later_fields_is_read():
    later = _with_a_field(RunConfig)
    text = RunConfig(sparsity=0.5).to_json()
    assert later.from_json(text) == later(sparsity=0.5)
    first = {name: value for name, value in json.loads(text).items() if name in FIRST_FIELDS}
    assert RunConfig.from_json(json.dumps(first)) == RunConfig(sparsity=0.5)


def test_changed_reaches_nested_configurations():
    study = changed(TuneConfig(), {"width": 96, "lr": 0.5, "num_samples": 3})
    assert (study.run.model.width, study.run.lr, study.num_samples) == (96, 0.5, 3)
    assert pickle.loads(pickle.dumps(study)) == study


def test_tuned_hyperparameters_bring_the_depth_at_which_they_were_tuned():
    tuned = {**HPS, "base_depth": 2}
    deep = resolve(RunConfig, Request({"depth": 8}, hps=tuned))
    assert (deep.model.depth, deep.base_depth) == (8, 2)
    same = resolve(RunConfig, Request({"depth": 2}, hps=tuned))
    assert same.id == resolve(RunConfig, Request({"depth": 2}, hps=HPS)).id
    study = resolve(TransferConfig, Request({"depths": (2, 8)}, hps=tuned))
    assert (study.base_depth, study.depths) == (2, (2, 8))
    with pytest.raises(ValueError, match=r"best\.json was tuned at --base-depth 2, not 4: leave the flag out"):
        resolve(RunConfig, Request({"depth": 8, "base_depth": 4}, hps=tuned, hps_file="best.json"))
    with pytest.raises(ValueError, match="tune on a model that is not deeper"):
        resolve(RunConfig, Request({"depth": 1}, hps=tuned))
