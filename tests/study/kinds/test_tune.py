"""The search on the proxy: what it proposes, without training; then tiny searches that train."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from smupar.cli.main import main
from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.output.json_files import sealed_json
from smupar.study.config import TUNED, EngineConfig, TuneConfig
from smupar.study.kinds.tune import FORMAT, Tuned, define_search, doubts, propose, read_hps, sensitivity, write_best
from smupar.study.run_configs import with_fields
from smupar.study.stages import run_study
from smupar.study.store import Study
from tests.support.texts import words

PROXY = RunConfig(
    model=ModelConfig(width=32, depth=1, head_dim=16),
    base_width=32,
    sparsity=0.0,
    steps=30,
    batch_size=4,
    seq_len=32,
    valid_batches=1,
    data=words(),
)
TINY = TuneConfig(run=PROXY, num_samples=8)
SERIAL = EngineConfig(engine="serial", device="cpu")
STACKED = EngineConfig(engine="stacked", device="cpu")
OPTIMUM = {"lr": 2**-6, "init_std": 0.087, "alpha_input": 9.17, "alpha_output": 1.095}


def tune(config: TuneConfig, how: EngineConfig, *, out: str) -> Tuned:
    with run_study(out, define_search(config), "smupar tune", how) as (study, _):
        study.write_table()
        return write_best(config, study)


def _bowl(run: RunConfig) -> float:
    """A loss that is lowest at the paper's best values, and infinite at high rates."""
    if run.lr > 2**-3.5:
        return math.inf
    return 2 + sum(math.log(getattr(run, name) / best) ** 2 for name, best in OPTIMUM.items())


def _search(config: TuneConfig) -> list[float]:
    """The losses of a whole search in the bowl."""
    losses: dict[str, float] = {}
    while len(losses) < config.num_samples:
        losses |= {run.id: _bowl(run) for run in propose(config, losses)}
    return list(losses.values())


def test_random_samples_are_a_function_of_seed_and_index():
    few, many = propose(TINY), propose(replace(TINY, num_samples=50))
    assert few == many[:8]
    assert propose(replace(TINY, search_seed=1))[0] != few[0]
    # Real numbers: a search begun elsewhere, or by an older version, goes on.
    assert [getattr(few[0], name) for name in TUNED] == [0.00535581, 0.205343, 21.789, 0.219366]


@pytest.mark.parametrize("method", ["random", "tpe"])
def test_samples_stay_in_their_ranges_and_fill_them(method):
    config = replace(TINY, method=method, num_samples=100, round_size=100)
    runs = propose(config)
    assert len({run.id for run in runs}) == 100
    for name, (low, high) in config.ranges.items():
        places = [math.log(getattr(run, name) / low) / math.log(high / low) for run in runs]
        assert 0 <= min(places) < 0.1
        assert 0.9 < max(places) <= 1
        assert sum(places) / 100 == pytest.approx(0.5, abs=0.1)
    assert with_fields(runs[0], {name: getattr(PROXY, name) for name in TUNED}) == PROXY


def test_tpe_is_a_function_of_the_results_and_waits_for_a_round():
    config = replace(TINY, method="tpe", num_samples=40, round_size=12)
    first = propose(config)
    assert len(first) == 12
    losses = {run.id: _bowl(run) for run in first}
    assert propose(config, dict(list(losses.items())[:11])) == first
    second = propose(config, losses)
    assert second[:12] == first
    assert len(second) == 24
    assert second == propose(config, dict(reversed(losses.items())))
    others = {id_: -loss for id_, loss in losses.items() if loss < math.inf}
    assert second != propose(config, losses | others)


@pytest.mark.parametrize(("seeds", "least"), [(1, 1), pytest.param(5, 4, marks=pytest.mark.slow)])
def test_tpe_finds_better_values_than_random_search(seeds, least):
    better = 0
    for seed in range(seeds):
        config = replace(TINY, num_samples=96, search_seed=seed)
        better += min(_search(replace(config, method="tpe"))) < min(_search(config))
    assert better >= least


def test_sensitivity_is_adjusted_for_the_two_coefficients_of_the_parabola():
    # Of ranks 0, 1, 3, 2 at equal distances the cubic part, which no parabola has, is 0.8 of a variance of 5: R^2 is 0.84.
    found = sensitivity([math.exp(x) for x in (-3, -1, 1, 3)], [4.0, 4.1, 4.3, 4.2])
    assert found.explained == pytest.approx(1 - 0.16 * 3 / 1)


def test_sensitivity_finds_the_one_that_matters():
    runs = propose(replace(TINY, num_samples=100))
    losses = [3 + 0.1 * math.log(run.init_std / 0.08) ** 2 if run.init_std < 0.3 else math.inf for run in runs]
    found = {name: sensitivity([getattr(run, name) for run in runs], losses) for name in TUNED}
    assert found["init_std"].explained > 0.8
    assert max(found[name].explained for name in TUNED if name != "init_std") < 0.1
    # 1 % of 3 is 0.03: a factor exp(sqrt(0.3)) = 1.73 to both sides
    assert 0.08 / 1.73 < found["init_std"].low < 0.06
    assert 0.11 < found["init_std"].high < 0.08 * 1.73
    assert found["lr"].high / found["lr"].low > 30


def test_sensitivity_of_few_samples_claims_nothing():
    assert sensitivity([0.1, 0.2, 0.3], [1.0, 2.0, 3.0]).explained == 0
    assert sensitivity([0.1] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]).explained == 0
    assert sensitivity([0.1, 0.2, 0.3, 0.4, 0.5], [1.0] * 5).explained == 0


def test_search_resumes_longer_and_repeats_nothing(tmp_path):
    out = str(tmp_path / "search")
    shorter = tune(replace(TINY, num_samples=5), STACKED, out=out)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "search").glob("runs/*/summary.json")}
    assert len(before) == 5
    tuned = tune(TINY, STACKED, out=out)
    assert tuned.best.loss <= shorter.best.loss
    best = tuned.path.read_text()
    assert len(list((tmp_path / "search").glob("runs/*"))) == 8
    assert tune(TINY, STACKED, out=out).path.read_text() == best
    assert all(path.stat().st_mtime_ns == at for path, at in before.items())
    assert tune(replace(TINY, num_samples=1), STACKED, out=out).path.read_text() == best

    hps = read_hps(tuned.path)
    assert hps == read_hps(out) == {**tuned.hps, "base_width": 32, "base_depth": 1}
    assert replace(with_fields(PROXY, hps), base_depth=None) == tuned.best.config
    source = json.loads(best)["source"]
    assert (source["width"], source["depth"], source["steps"], source["num_samples"]) == (32, 1, 30, 8)
    text = tuned.explain()
    assert "the best of 8 samples" in text
    assert all(name in text for name in TUNED)
    assert "8 samples are too few to tell which hyperparameter matters: at least 16 are needed" in text
    assert "%" not in text


@pytest.mark.slow
def test_killed_search_ends_with_the_same_best(tmp_path):
    for method in ("random", "tpe"):
        config = replace(TINY, method=method, round_size=4, run=replace(PROXY, steps=60))
        whole = tune(config, SERIAL, out=str(tmp_path / f"{method}-whole"))
        out = tmp_path / f"{method}-killed"
        code = f"from tests.study.kinds.test_tune import *; tune({_source(config)}, SERIAL, out={str(out)!r})"
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 100
        while len(list(out.glob("runs/*/summary.json"))) < 5 and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert 5 <= len(list(out.glob("runs/*/summary.json"))) < 8
        assert not (out / "best.json").exists()
        again = tune(config, SERIAL, out=str(out))
        assert again.path.read_text() == whole.path.read_text()
        assert (out / "table.csv").read_text() == (tmp_path / f"{method}-whole" / "table.csv").read_text()


def _source(config: TuneConfig) -> str:
    changed = {name: getattr(config, name) for name in ("method", "round_size")}
    return f"replace(TINY, run=replace(PROXY, steps={config.run.steps}), **{changed})"


def test_all_diverged_says_to_lower_the_range(tmp_path):
    config = replace(TINY, num_samples=2, lr_range=(1e9, 1e10))
    with pytest.raises(ValueError, match=r"all 2 samples diverged: lower --lr-range, now 1e\+09 .. 1e\+10"):
        tune(config, STACKED, out=str(tmp_path / "search"))
    assert len(Study(tmp_path / "search").results()) == 2


def test_another_search_in_the_folder_is_refused_by_field(tmp_path):
    with Study.open(tmp_path / "search", {}, ""):
        pass
    with pytest.raises(ValueError, match="holds another study"):
        tune(TINY, STACKED, out=str(tmp_path / "search"))
    out = str(tmp_path / "other")
    tune(replace(TINY, num_samples=1), STACKED, out=out)
    with pytest.raises(ValueError, match="search_seed 0 there, 1 here"):
        tune(replace(TINY, search_seed=1), STACKED, out=out)
    with pytest.raises(ValueError, match="steps 30 there, 31 here"):
        tune(replace(TINY, run=replace(PROXY, steps=31)), STACKED, out=out)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_samples": 0}, "num_samples must be at least 1"),
        ({"method": "grid"}, "method must be random or tpe"),
        ({"lr_range": (0.1, 0.01)}, "lr_range must be two numbers above 0, the smaller first"),
        ({"alpha_input_range": (0.0, 1.0)}, "alpha_input_range must be two numbers above 0"),
    ],
)
def test_bad_searches_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changed)


def test_missing_optuna_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'smupar\[search\]'"):
        propose(replace(TINY, method="tpe"))


GOOD = {"format": "smupar-hps/1", "lr": 0.01, "init_std": 0.1, "alpha_input": 9, "alpha_output": 1.0, "base_width": 64}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"lr": 0.0', r"best.json is damaged \(.*`smupar tune` writes it again"),
        ("[1, 2]", r"best.json is damaged \(expected fields, got \[1, 2\]\)"),
        ('{"lr": 0.01, "weight_decay": 0}', "was not written by `smupar tune`"),
        (json.dumps(GOOD | {"alpha_input": None}), "alpha_input must be a number above 0, got None"),
        (json.dumps(GOOD | {"lr": -1}), "lr must be a number above 0, got -1"),
        (json.dumps(GOOD | {"lr": math.nan}), "lr must be a number above 0, got nan"),
        (json.dumps({name: value for name, value in GOOD.items() if name != "base_width"}), "base_width must be a number"),
        (json.dumps(GOOD | {"base_width": 64.5}), "base_width must be a whole number"),
        (json.dumps(GOOD | {"source": ["adamw"]}), r"source must have fields, got \['adamw'\]"),
        (json.dumps(GOOD | {"source": {"optimizer": 3}}), "optimizer must be text, got 3"),
    ],
)
def test_damaged_and_foreign_files_are_refused(tmp_path, text, message):
    path = tmp_path / "best.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_hps(path)
    assert "\n" not in str(caught.value)


def test_missing_file_says_who_writes_it(tmp_path):
    for path in (tmp_path, tmp_path / "best.json"):
        with pytest.raises(FileNotFoundError, match=r"there is no .*best\.json: `smupar tune` writes it"):
            read_hps(path)


def test_good_file_is_read(tmp_path):
    (tmp_path / "best.json").write_text(json.dumps(GOOD))
    assert read_hps(str(tmp_path)) == {name: value for name, value in GOOD.items() if name != "format"}


@pytest.mark.filterwarnings("default::UserWarning")
def test_edited_file_is_read_with_a_note(tmp_path, capsys):
    (tmp_path / "best.json").write_text(sealed_json(GOOD).replace("0.01", "0.02"))
    main(["plan", "--hps", str(tmp_path)])
    assert capsys.readouterr().err.count("best.json has changed since smupar wrote it") == 1


def test_other_base_width_than_that_of_the_search_is_refused(tmp_path, capsys):
    (tmp_path / "best.json").write_text(json.dumps(GOOD))
    with pytest.raises(SystemExit):
        main(["plan", "--hps", str(tmp_path), "--base-width", "128"])
    assert "was tuned at --base-width 64, not 128: leave the flag out" in capsys.readouterr().err


def test_values_tuned_for_another_optimizer_or_rule_are_doubted(tmp_path):
    best = {"format": FORMAT, **dict.fromkeys(TUNED, 0.1), "base_width": 64, "source": {"rule": "smupar", "optimizer": "adamw"}}
    (tmp_path / "best.json").write_text(json.dumps(best))
    assert doubts(tmp_path, optimizer="AdamW", rule="mup") == []
    (line,) = doubts(tmp_path, optimizer="sgd", rule="smupar")
    assert "was tuned with adamw, this run uses sgd" in line
    (line,) = doubts(tmp_path / "best.json", optimizer="adamw", rule="sp")
    assert "was tuned under smupar, this run uses sp" in line
