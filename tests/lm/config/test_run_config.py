"""Configurations of runs: what they refuse, as text, and the presets."""

import json
import math
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from smupar.lm.config.commands import CheckConfig
from smupar.lm.config.mask_methods import MASK_METHODS
from smupar.lm.config.presets import preset
from smupar.lm.config.run_config import Execution, ModelConfig, RunConfig
from smupar.lm.config.run_id import as_text
from smupar.study.config import TransferConfig, TuneConfig

RUN = RunConfig(model=ModelConfig(width=64, depth=1), base_width=32, sparsity=0.75, steps=5, batch_size=2, seq_len=16)


def _with(config=RUN, **options):
    """The run with other options of its model."""
    return replace(config, model=replace(config.model, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 100}, "width 100 is not a multiple of head_dim 32: 96 would be, or choose another --head-dim"),
        ({"width": 0}, "width must be a positive whole number, got 0"),
        ({"depth": 0}, "depth must be a positive whole number, got 0"),
        ({"vocab_size": -1}, "vocab_size must be a positive whole number, got -1"),
        ({"head_dim": 0}, "head_dim must be a positive whole number, got 0"),
        ({"ff_ratio": 0.0}, "ff_ratio must lie in"),
        ({"ff_ratio": math.nan}, "ff_ratio must lie in"),
        ({"ff_multiple": 0}, "ff_multiple must be a positive whole number"),
        ({"width": 15, "head_dim": 5, "positions": "rotary"}, "head_dim 5 is odd: choose an even --head-dim"),
    ],
)
def test_bad_model_raises_with_a_remedy(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_width": 48}, "base width 48 is not a multiple of head_dim 32, .*: choose another --base-width or --head-dim"),
        ({"sparsity": 1.0}, r"sparsity must lie in \[0, 1\), got 1.0: 0.75 keeps a quarter"),
        ({"sparsity": -0.1}, r"sparsity must lie in \[0, 1\)"),
        ({"sparsity": math.nan}, r"sparsity must lie in \[0, 1\)"),
        ({"steps": 0}, "steps must be a positive whole number, got 0"),
        ({"batch_size": 0}, "batch_size must be a positive whole number"),
        ({"lr": -1.0}, "lr must be a number, at least 0, got -1.0"),
        ({"betas": (0.9, 1.0)}, r"betas must lie in \[0, 1\), got \(0.9, 1.0\)"),
        ({"betas": (math.inf, 0.9)}, r"betas must lie in \[0, 1\)"),
        ({"clip": 0.0}, "clip must be a number above 0, got 0.0: leave it out for no clipping"),
        ({"decay": "held", "dynamic": "gmp", "sparsity": 0.5}, "choose another --decay, or masks that keep their density"),
        ({"steps": 10, "warmup": 11}, r"warmup must lie in \[0, steps = 10\], got 11"),
        ({"warmup": -1}, r"warmup must lie in \[0, steps = 400\], got -1"),
        (
            {"model": ModelConfig(positions="learned", context=32), "seq_len": 64},
            "seq_len 64 is longer than the model's context: pass --context 64",
        ),
    ],
)
def test_bad_run_raises_with_a_remedy(options, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**options)


MANY = int("9" * 20)


@pytest.mark.parametrize(
    ("make", "name", "largest"),
    [
        (ModelConfig, "width", "1,048,576"),
        (ModelConfig, "depth", "10,000"),
        (ModelConfig, "head_dim", "1,048,576"),
        (ModelConfig, "vocab_size", "16,777,216"),
        (ModelConfig, "ff_multiple", "1,048,576"),
        (ModelConfig, "context", "1,073,741,824"),
        (RunConfig, "base_width", "1,048,576"),
        (RunConfig, "steps", "1,000,000,000,000"),
        (RunConfig, "batch_size", "1,073,741,824"),
        (RunConfig, "seq_len", "1,073,741,824"),
        (RunConfig, "valid_batches", "1,000,000"),
        (RunConfig, "rounds", "10,000"),
        (Execution, "keep", "9,223,372,036,854,775,807"),
        (Execution, "save_every", "9,223,372,036,854,775,807"),
        (CheckConfig, "seeds", "10,000"),
        (TransferConfig, "seeds", "10,000"),
        (TransferConfig, "proxy_steps", "1,000,000,000,000"),
        (TransferConfig, "proxy_depth", "10,000"),
        (TuneConfig, "num_samples", "1,000,000"),
        (TuneConfig, "round_size", "1,000,000"),
    ],
)
def test_number_with_twenty_digits_is_refused_at_once(make, name, largest):
    with pytest.raises(ValueError, match=rf"^{name.removeprefix('proxy_')} must be at most {largest}, got {MANY}$"):
        make(**{name: MANY})
    with pytest.raises(ValueError, match=r"got 99999999999999999999\.\.\. \(400 digits\)$"):
        make(**{name: int("9" * 400)})
    make(**{name: 64})


def test_widths_with_twenty_digits_are_refused_at_once():
    for make in (CheckConfig, TransferConfig):
        with pytest.raises(ValueError, match=f"^width must be at most 1,048,576, got {MANY}$"):
            make(widths=(256, MANY))


def test_context_limits_learned_positions_only():
    for positions in ("alibi", "rotary", "none"):
        assert RunConfig(model=ModelConfig(positions=positions, context=32), seq_len=64).seq_len == 64


def test_run_configuration_reads_back_as_written():
    config = replace(RUN, betas=(0.8, 0.99), clip=1.0, model=replace(RUN.model, ff_ratio=2.5, positions="rotary"))
    assert RunConfig.from_json(config.to_json()) == config
    assert RunConfig.from_json(config.to_json()).id == config.id


def test_id_changes_with_everything_that_decides_the_result():
    assert len({RUN.id, replace(RUN, seed=1).id, replace(RUN, lr=0.5).id, _with(biases=True).id, _with(depth=2).id}) == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is damaged"),
        ("[]", "expected fields"),
        ("{}", "is not the configuration of a run"),
        ('{"rule": "mup", "model": {"size": 3}}', "unknown field 'model.size'"),
        ('{"rule": "mup", "lr": "1"}', "lr should be a number"),
        ('{"rule": "mup", "betas": [0.9]}', "betas.length should be 2, is 1"),
        ('{"rule": "mup", "steps": -1}', "steps must be"),
    ],
)
def test_other_json_is_not_a_run(text, said):
    with pytest.raises(ValueError, match=rf"^here .*{said}.*: restore it$"):
        RunConfig.from_json(text, source="here")


def test_presets_have_the_schedules_of_table_4():
    paper, iso = preset("paper-610m"), preset("paper-iso")
    assert (paper.steps, paper.warmup_steps, paper.schedule) == (11752, 1175, "linear-to-zero")
    assert (iso.steps, iso.warmup_steps, iso.schedule) == (1907, 190, "linear")
    assert iso.num_tokens == pytest.approx(1e9, rel=1e-3)


def test_presets_have_the_hyperparameters_of_tables_3_and_4():
    for name, sp_lr in (("paper-610m", 2e-4), ("paper-iso", 6e-4)):
        sp = preset(name, "sp")
        assert (sp.rule, sp.lr, sp.init_std) == ("sp", sp_lr, 0.02)
        for rule in ("mup", "smupar"):
            config = preset(name, rule)
            assert (config.rule, config.base_width, config.lr, config.init_std) == (rule, 256, 1.62e-2, 0.08665602)
            assert (config.alpha_input, config.alpha_output) == (9.1705, 1.0951835)
    assert (preset("paper-610m").batch_size, preset("paper-iso").batch_size) == (504, 256)


def test_unknown_preset_raises_with_those_there_are():
    with pytest.raises(ValueError, match="no preset is called 'huge': choose one of demo, 610m, paper-610m, paper-iso"):
        preset("huge")


def test_610m_preset_is_the_paper_model_in_sizes_that_suit_a_gpu():
    config, paper = preset("610m"), preset("paper-610m")
    assert config.model.inner_width == 5440  # a multiple of 64
    assert config.model.vocab_size % 64 == 0
    assert not config.model.biases
    assert (config.steps, config.batch_size, config.lr, config.dtype) == (paper.steps, paper.batch_size, paper.lr, "bf16")


def test_table_of_mask_methods_is_of_this_run():
    hints = get_type_hints(RunConfig)
    assert tuple(MASK_METHODS) == get_args(hints["dynamic"])
    assert {name for method in MASK_METHODS.values() for name in method.fields} < hints.keys()


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


@given(st.dictionaries(st.text(), SCALARS | st.lists(SCALARS) | st.dictionaries(st.text(), SCALARS, min_size=1), min_size=1))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the first letters take long to draw
@example({"betas": (0.9, 0.95), "zero": [0.0, -0.0, 0], "one": [1, 1.0, True], "empty": ()})
def test_text_that_is_hashed_is_what_json_writes(values):
    """Otherwise the ids of runs would change."""
    assert as_text(values) == json.dumps(values, indent=1)
