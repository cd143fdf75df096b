"""The command line: what it prints, and how it exits."""

import json
import subprocess
import sys

import numpy as np
import pytest

import smupar
from smupar.cli.main import main
from smupar.lm.data.shard_writer import write_tokens
from smupar.lm.data.shards import TokenizerInfo


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_help_does_not_import_torch():
    helps = "for name in ['', *COMMANDS]: main([*name.split(), '--help-all'])"
    code = f"import sys\nfrom smupar.cli.main import COMMANDS, main\n{helps}\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


def test_import_smupar_loads_nothing_above_the_core():
    code = "import sys, smupar; smupar.parameterize, smupar.audit; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "smupar.check.audit" in loaded
    assert not [name for name in loaded if name.startswith(("smupar.lm", "smupar.cli.main", "smupar.bench.models"))]


def test_rules_prints_the_smupar_column(command):
    short = command("rules").stdout.splitlines()
    assert "  LR       eta                 eta / m_in              eta / (m_in m_rho)" in short
    assert max(map(len, short[:-1])) < 80  # the table; then comes a sentence
    lines = command("rules", "--full").stdout.splitlines()
    hidden = next(line for line in lines if line.startswith("hidden LR (Adam family)"))
    assert "eta / (m_in m_rho)" in hidden
    assert next(line for line in lines if line.startswith("unembedding forward")).count("alpha_out x W^T / m_in") == 4


def test_plan_prints_json_that_reads_back(command):
    done = command("plan", "--width", "128", "--sparsity", "0.75", "--json")
    plan = smupar.Plan.from_json(done.stdout)
    row = plan["blocks.0.attention.qkv.weight"]
    assert (row.width_in, row.density_mult, row.lr_factor("adam")) == (2, 0.25, 2.0)
    assert json.loads(done.stdout)["format"] == "smupar-plan/1"


def test_train_reports_the_loss_after_the_plan(command):
    done = command("train", "--width", "64", "--depth", "1", "--steps", "3", "--seq-len", "16", "--sparsity", "0.5")
    assert done.returncode == 0, done.stderr
    assert "hidden     5        47,104   0.5" in done.stderr
    losses, run, advice = done.stdout.splitlines()
    assert "validation loss" in losses
    assert run.startswith("rule smupar, 50.0% sparsity")
    assert advice.startswith("sample from it: smupar generate ")
    full = command("train", "--width", "64", "--depth", "1", "--steps", "2", "--seq-len", "16", "--sparsity", "0.5", "--full")
    assert "blocks.0.mlp.down.weight" in full.stderr


def test_bad_input_exits_with_2_and_one_line(command):
    done = command("train", "--sparsity", "1.0")
    assert done.returncode == 2
    assert "sparsity must lie in [0, 1)" in done.stderr
    done = command("train", "--pattern", "3:7", "--steps", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("smupar: ")
    assert "Traceback" not in done.stderr
    assert "needs a width that is a multiple of 7" in done.stderr


def test_pattern_that_fixes_the_density_needs_no_sparsity(command):
    done = command("train", "--pattern", "2:4", "--width", "64", "--depth", "1", "--steps", "2", "--seq-len", "16")
    assert done.returncode == 0, done.stderr
    assert "rule smupar, 50.0% sparsity" in done.stdout


def test_check_without_matplotlib_still_gives_its_verdict(tmp_path):
    size = "--widths 64 --base-width 32 --sparsities 0 0.5 --depth 1 --steps 1 --seeds 1 --seq-len 16"
    args = ["check", "--rules", "smupar", *size.split(" "), "--out", str(tmp_path)]
    code = f"import sys; sys.modules['matplotlib'] = None; from smupar.cli.main import main; main({args})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    assert "pip install 'smupar[plot]'" in done.stderr
    verdict, first, *_ = done.stdout.splitlines()
    assert verdict in ("The check passes.", "The check does not pass.", "The check cannot tell yet: run it with more seeds.")
    assert " SmuPar over density" in first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["check.html", "check.json"]


def test_dry_run_of_the_paper_preset_prints_its_size(command):
    done = command("train", "paper-610m", "--dry-run")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert lines["parameters"].split() == ["parameters", "606,519,972"]
    assert "11,752 steps of 504 x 2048; 20 for each parameter" in lines["tokens"]
    assert lines["machine"].startswith("machine     1 H200, not this computer")


def test_preset_depends_on_the_rule(command):
    plan = smupar.Plan.from_json(command("plan", "paper-610m", "--rule=sp", "--json").stdout)
    assert plan.rule == "sp"
    assert plan["embedding.weight"].init_std == 0.02  # Table 4; muP and SmuPar have Table 3's 0.08665602


@pytest.mark.parametrize("name", ["train", "plan"])
def test_unknown_preset_exits_with_2_and_names_the_known_ones(command, name):
    done = command(name, "huge")
    assert done.returncode == 2
    assert done.stderr == "smupar: no preset is called 'huge': choose one of demo, 610m, paper-610m, paper-iso\n"


def test_preset_behind_the_flags_is_not_taken_for_the_demo(command):
    done = command("train", "--dry-run", "paper-610m")
    assert done.returncode == 2 or "606,519,972" in done.stdout


def test_data_sets_the_vocabulary_by_itself(command, tmp_path):
    write_tokens(tmp_path / "text", np.arange(1000), TokenizerInfo("tiny", 1000, None, "a" * 64))
    done = command("plan", "--data", str(tmp_path / "text"), "--json")
    assert smupar.Plan.from_json(done.stdout)["embedding.weight"].shape == (1024, 256)


def test_data_that_is_not_there_exits_with_2_and_the_remedy(command, tmp_path):
    done = command("train", "--data", str(tmp_path / "none"))
    assert done.returncode == 2
    assert done.stderr == f"smupar: no folder {tmp_path}/none: make it with smupar data prepare FILE --out {tmp_path}/none\n"


def test_bad_head_size_exits_with_2_and_one_line(command):
    done = command("train", "--width", "100")
    assert done.returncode == 2
    assert done.stderr.startswith("smupar: width 100 is not a multiple of head_dim 32: 96 would be")
    assert done.stderr.count("\n") == 1


def test_version_is_printed_by_a_process_of_its_own():
    said = subprocess.run([sys.executable, "-m", "smupar", "--version"], capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"smupar {smupar.__version__}")


def test_of_a_flag_given_twice_the_last_counts(command):
    wanted = command("plan", "paper-610m", "--rule", "smupar").stdout
    assert "rule SmuPar" in wanted
    assert command("plan", "paper-610m", "--rule", "sp", "--rule", "smupar").stdout == wanted


@pytest.mark.parametrize(("num_bytes", "name"), [(50, "study.json"), (9000, "report.html")])
def test_study_on_a_full_disk_names_the_file_and_what_to_do(command, tmp_path, small_files, num_bytes, name):
    sizes = ["--width", "64", "--depth", "1", "--steps", "1", "--batch-size", "1", "--seq-len", "8", "--valid-batches", "1"]
    with small_files(num_bytes):
        done = command("sweep", "lr=0.01,0.02", *sizes, "--engine", "serial", "--out", tmp_path / "s")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"smupar: {tmp_path}/s/{name}: File too large. Make room there (delete files, or have the quota raised) or name "
        "another path, then run the same command again"
    )


def test_errors_of_the_system_name_the_path_and_what_to_do(command, tmp_path):
    (tmp_path / "file").write_text("")
    said = command("reproduce", "tab01", "--out", "file/x")
    assert (said.returncode, said.stderr) == (
        2,
        "smupar: file/x/cpu/tab01: Not a directory. Name another path, or make this one usable\n",
    )
    (tmp_path / "proxy").mkdir()
    said = command("train", "--follow", "proxy", "--steps", "2")
    assert "smupar: proxy is a folder: name the trace in it, proxy/trace.json" in said.stderr


def test_completion_has_help(capsys):
    main(["completion", "--help"])
    assert capsys.readouterr().out.startswith("smupar completion {")
