"""What commands print: the answer alone on standard output, as text or as JSON."""

import json
import subprocess
import sys

import pytest

from smupar.cli.answers import Reply, TextLine, cards, plain, show
from smupar.cli.main import COMMANDS, answers

SIZE = "--width 64 --depth 1 --steps 3 --seq-len 8 --batch-size 1 --valid-batches 1"
SWEEP = f"sweep lr=0.01,0.02 {SIZE} --engine stacked --device cpu"
TRANSFER = (
    "transfer --widths 64 --base-width 32 --rules smupar --sparsities 0 --values 0.1 0.2 0.3 --device cpu "
    + SIZE.replace("--width 64 ", "")
)
ROOT_ANSWERS = {"rules", "plan", "check", "train", "generate", "export", "sweep", "tune", "transfer", "reproduce", "report"}


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path


def test_every_command_that_answers_has_json():
    silent = {name for name in COMMANDS if not answers(name)}
    assert silent == {"watch", "data"}
    assert set(COMMANDS) - silent >= ROOT_ANSWERS


def test_json_of_every_kind_of_command_is_all_that_standard_output_has(command, in_folder):
    (in_folder / "text.txt").write_text("to be or not to be " * 50)

    def answer(words, code=0):
        done = command(*words.split(), "--json")
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    assert len(answer("rules")["rules"]) > 10
    assert answer("plan --width 128")["format"] == "smupar-plan/1"
    trained = answer(f"train {SIZE} --out run")
    assert (trained["status"], trained["steps"], trained["config"]["lr"]) == ("finished", 3, 2**-6)
    assert answer("generate run --tokens 5 --prompt abc")["text"].startswith("abc")
    assert answer("export run model")["out"] == "model"
    assert answer("verify run")["intact"]
    (in_folder / "model" / "config.json").write_text("{}")
    assert answer("verify model", code=1)["wrong"]
    assert answer("train paper-610m --dry-run")["cost"]["num_parameters"] == 606_519_972
    assert answer("data prepare text.txt --out text")["tokens"] == 950 + 1
    swept = answer(f"{SWEEP} --out swept")
    assert (swept["runs"], swept["diverged"], swept["is_finished"]) == (2, 0, True)
    assert swept["best"]["fields"]["lr"] in (0.01, 0.02)
    assert answer("report swept") == swept
    (card,) = answer(f"{TRANSFER} --out moved")["answers"]
    assert card["name"] == "SmuPar"
    tuned = answer(f"tune --num-samples 3 --base-width 64 {SIZE} --device cpu --out tuned")
    assert tuned["hps"] == {name: json.loads((in_folder / "tuned/best.json").read_text())[name] for name in tuned["hps"]}
    (figure,) = answer("reproduce tab01 --out figures")["figures"]
    assert (figure["figure"], figure["holds"]) == ("tab01", True)
    assert answer("reproduce --list")["figures"][0]["figure"] == "tab01"
    size = "--widths 64 --base-width 32 --sparsities 0 0.5 --depth 1 --steps 1 --seeds 1 --seq-len 8 --rules smupar --out c"
    done = command("check", *size.split(), "--json")
    assert json.loads(done.stdout)["ok"] == (done.returncode == 0)


def test_dry_runs_cost_nothing_and_leave_nothing(command, in_folder):
    for words, runs in ((SWEEP, 2), (f"{TRANSFER} --seeds 2", 12), (f"tune --num-samples 3 {SIZE} --device cpu", 3)):
        done = command(*words.split(), "--dry-run", "--json", "--out", "study")
        assert done.returncode == 0, done.stderr
        expected = json.loads(done.stdout)
        assert (expected["runs"], expected["done"]) == (runs, 0)
        assert expected["seconds"] > 0
        assert expected["memory_gib"] > 0
    assert list(in_folder.iterdir()) == []
    text = command(*SWEEP.split(), "--dry-run").stdout
    assert [line.split()[0] for line in text.splitlines()] == [
        "runs",
        "parameters",
        "tokens",
        "FLOPs",
        "time",
        "memory",
        "folder",
    ]


def test_dry_run_counts_what_is_done(command, in_folder):
    assert command(*SWEEP.split(), "--out", "s").returncode == 0
    longer = SWEEP.replace("0.02", "0.02,0.03")
    done = json.loads(command(*longer.split(), "--out", "s", "--dry-run", "--json").stdout)
    assert (done["runs"], done["done"]) == (3, 2)


def test_quiet_command_says_its_answer_and_warnings_only(command, in_folder):
    done = command(*f"train {SIZE} --out run --quiet".split())
    assert done.stdout.startswith("train loss ")
    assert done.stdout.endswith("\nsample from it: smupar generate run\n")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stderr == ""
    assert "training in" in command(*f"train {SIZE} --seed 1 --out two".split()).stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trian", "smupar: no command is called 'trian': did you mean train or transfer? smupar --help lists the commands\n"),
        ("train --widht 3", "smupar: train has no flag --widht: did you mean --width"),
        ("train --width x", "smupar: --width takes a whole number, got 'x': see smupar train --help\n"),
        ("train --dtype fp16", "smupar: --dtype takes one of fp32, bf16, got 'fp16'"),
        ("train --rule", "smupar: --rule needs a value: see smupar train --help"),
        ("report", "smupar: missing: FOLDER: see smupar report --help"),
        ("report nowhere", "smupar: there is no folder nowhere: name the folder of a study\n"),
        ("sweep", "smupar: sweep needs an axis: name a field and its values, for example smupar sweep lr=2^-10..2^-4\n"),
        ("transfer --rul sp", "smupar: transfer has no flag --rul: did you mean --rules"),
        ("completion fish", "smupar: completion needs a shell, bash or zsh: smupar completion bash\n"),
    ],
)
def test_mistake_is_told_in_one_line_and_leaves_nothing(command, in_folder, words, said):
    done = command(*words.split())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(said)
    assert list(in_folder.iterdir()) == []


@pytest.mark.parametrize("words", ["train --rule smupr", "check --widths 100", "check --rules x", "sweep lr=1 --pattern 3:7"])
def test_refused_command_leaves_no_folder(command, in_folder, words):
    assert command(*words.split()).returncode == 2
    assert list(in_folder.iterdir()) == []


def test_study_without_matplotlib_says_so_first_and_prints_what_it_found(in_folder):
    argv = [*SWEEP.split(), "--out", "s"]
    code = f"import sys; sys.modules['matplotlib'] = None; from smupar.cli.main import main; main({argv})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first = done.stderr.splitlines()[0]
    assert first.startswith("smupar: note: no picture is drawn")
    assert "pip install 'smupar[plot]'" in first
    assert done.stdout.startswith("The best loss is")
    assert "s/report.html, table.csv" in done.stdout
    assert not (in_folder / "s" / "picture.png").exists()


@pytest.mark.parametrize(
    ("variables", "has"), [({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False), ({"FORCE_COLOR": "1"}, True), ({}, False)]
)
def test_colours_follow_the_environment(monkeypatch, capsys, variables, has):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    show(Reply([TextLine("why", "PASS", "good")]), as_json=False)
    assert capsys.readouterr().out == ("\x1b[1;32mPASS\x1b[0m why\n" if has else "PASS why\n")


def test_card_of_a_page_is_a_line_with_its_verdict_first():
    card = {"name": "SP", "value": "12x", "text": "It moved\nfar", "tone": "bad", "rule": "SP"}
    assert cards([card]) == [TextLine("It moved; far", "SP 12x:", "bad")]


def test_numbers_that_json_lacks_are_null():
    assert plain({"a": [float("nan"), float("inf"), 1.5], "b": (None,)}) == {"a": [None, None, 1.5], "b": [None]}
