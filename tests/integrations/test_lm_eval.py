"""Downstream tasks: our scores against the harness's own model, its metrics on answers that are known, and files that go on."""

import csv
import json
import math
import shutil
import sys
import warnings
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from smupar.cli import main as cli
from smupar.integrations.eval_table import Number, with_average
from smupar.integrations.lm_eval import evaluate, load_tasks, read_documents, tabulate, write_requests
from smupar.lm.config.commands import EvalConfig, ExportConfig, ScoringConfig, TasksConfig
from smupar.lm.config.run_config import RunConfig
from smupar.lm.data.tokenizer import Tokenizer
from smupar.lm.use.export import export
from smupar.lm.use.load import load_model
from smupar.lm.use.score import encode_pair, load_scoring_model, score, score_file, scoring_model_of
from smupar.lm.use.score_files import ScoreRequest, read_requests, read_scores
from smupar.lm.use.score_files import write_requests as write_request_file
from tests.lm.use.tiny import chain, trained_run
from tests.support.texts import bpe

CPU = torch.device("cpu")
ON_CPU = ScoringConfig(device="cpu", batch_size=3)
TEXT = "The bell rang, and the sea answered. Nobody in the house had heard it before; the sea went on as it always had. "
TASKS = ("arc_easy", "lambada_openai", "race", "piqa", "boolq")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained_run(tmp_path_factory.mktemp("run"), (TEXT * 40).encode())


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return _save_gpt2(tmp_path_factory.mktemp("gpt2"), begins=False)


def _save_gpt2(folder, *, begins):
    """As transformers saves it, with 32 positions, a BPE of 300 ids, and weights large enough to have opinions. The tokenizer
    of some models ``begins`` every text with a token of its own."""
    tokenizers, transformers = import_module("tokenizers"), import_module("transformers")
    library, end = bpe([TEXT] * 5), "<|endoftext|>"
    if begins:
        library.post_processor = tokenizers.processors.TemplateProcessing(single=f"{end} $A", special_tokens=[(end, 0)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=library, eos_token=end, bos_token=end).save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 300, "initializer_range": 0.3}
    config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Six documents of each task. The right answers are made of a's, the wrong ones of z's."""
    folder = tmp_path_factory.mktemp("data")
    for task, prefix, num_choices in (("arc_easy", "Question:", 4), ("race", "Article:", 4), ("piqa", "Question:", 2)):
        lines = [_choices(f"{prefix} number {number}?", number % num_choices, num_choices) for number in range(6)]
        _write(folder / f"{task}.jsonl", lines)
    _write(folder / "boolq.jsonl", [_choices(f"Passage: {n}.\nQuestion: is it b?", n % 2, 2) for n in range(6)])
    _write(folder / "lambada_openai.jsonl", [{"context": f"Say {n} b", "continuation": "aaa"} for n in range(6)])
    return str(folder)


def _choices(query, gold, number):
    return {"query": query, "choices": ["aaa" if choice == gold else "zzz" for choice in range(number)], "gold": gold}


def _write(path, lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def _chain(folder, following):
    return chain(folder, {ord(letter): ord(after) for letter, after in following.items()})


def _asked(*pairs):
    return [ScoreRequest("piqa", number, 0, *pair) for number, pair in enumerate(pairs)]


def _scores(subject, requests, config=ON_CPU):
    found = {request: answer for batch in score(subject, requests, config, CPU) for request, answer in batch}
    return [found[request] for request in requests]


def _evaluate(folders, data, out, tasks=TASKS, **options):
    return evaluate(EvalConfig(tuple(folders), TasksConfig(tasks, data, **options), ON_CPU, str(out)))


# Scores


PAIRS = [
    ("The bell rang", ", and the sea answered."),
    ("The bell rang ", "and the sea"),  # the space belongs to the continuation
    ("The bell rang \n ", " twice"),
    ("", "The sea"),
    ("", "<|endoftext|>The sea"),  # begins with what stands for no context
    ("<|endoftext|>The sea", " went on"),
    (TEXT, " The bell"),  # longer than 32 tokens
    (TEXT[:20], TEXT[20:60]),
    *((f"Nobody in {what}", word) for what in ("the", "a house") for word in ["the,", "house.", "sea", *"aethbrnso"]),
    *(("The sea", character) for character in map(chr, range(32, 127))),
]


@pytest.mark.parametrize("begins", [False, True])
def test_scores_are_those_of_the_harness_on_a_model_of_transformers(tmp_path, begins):
    folder = _save_gpt2(tmp_path, begins=begins)
    assert load_scoring_model(folder, CPU).encode("The sea")[:1] == [0] or not begins
    instance = import_module("lm_eval.api.instance").Instance
    peer = import_module("lm_eval.models.huggingface").HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=4)
    asked = [instance("loglikelihood", {}, pair, number) for number, pair in enumerate(PAIRS)]
    expected = peer.loglikelihood(asked, disable_tqdm=True)
    with pytest.warns(UserWarning, match="1 requests are longer than 32 tokens: their beginning was cut off"):
        found = _scores(load_scoring_model(folder, CPU), _asked(*PAIRS))
    np.testing.assert_allclose([s.loglikelihood for s in found], [number for number, _ in expected], atol=1e-4)
    assert [s.is_greedy for s in found] == [greedy for _, greedy in expected]
    assert begins or {s.is_greedy for s in found} == {True, False}  # some are the likeliest


def test_score_of_our_model_is_the_sum_over_its_log_softmax(run):
    model, tokenizer = load_model(run)
    (found,) = _scores(scoring_model_of(model, tokenizer, {}), _asked(("The bell ", "rang")))
    ids = torch.tensor([tokenizer.encode("The bell rang").tolist()])
    with torch.no_grad():
        shares = model(ids[:, :-1]).log_softmax(-1)[0]
    assert found.loglikelihood == pytest.approx(float(sum(shares[i, ids[0, i + 1]] for i in range(7, 12))), abs=1e-5)


@pytest.mark.parametrize("repeats", [1, 12])  # 1024 places are scored at a time: all at once, or in parts
def test_padding_and_batches_do_not_change_scores(run, repeats):
    requests = _asked(("a", "b"), ("The bell", " rang"), (TEXT, "The"), ("The bell ", "rang, and"), ("x", TEXT * repeats))
    subject = load_scoring_model(run, CPU)
    alone = [_scores(subject, [request])[0] for request in requests]
    together = _scores(subject, requests, ScoringConfig(device="cpu", batch_size=5))
    assert [s.is_greedy for s in together] == [s.is_greedy for s in alone]
    np.testing.assert_allclose([s.loglikelihood for s in together], [s.loglikelihood for s in alone], rtol=1e-5)
    rounded = _scores(subject, requests, ScoringConfig(device="cpu", dtype="bf16"))
    np.testing.assert_allclose([s.loglikelihood for s in rounded], [s.loglikelihood for s in alone], rtol=0.02)


def test_what_is_too_long_loses_its_beginning(run):
    subject, short = load_scoring_model(run, CPU), ScoringConfig(device="cpu", max_length=10)
    with pytest.warns(UserWarning, match="1 requests are longer than 10 tokens"):
        (cut,) = _scores(subject, _asked((TEXT, "xyz")), short)
    (kept,) = _scores(subject, _asked((TEXT.rstrip()[-7:], " xyz")), short)  # 7 + 4 bytes, the last is not an input
    assert cut.loglikelihood == pytest.approx(kept.loglikelihood, abs=1e-5)


def test_requests_that_cannot_be_scored_raise(run):
    subject = load_scoring_model(run, CPU)
    assert encode_pair(subject, _asked((" ", "a"))[0], 9) == ([0], [32, 97])
    with pytest.raises(ValueError, match="document 0 of piqa has a continuation of 5 tokens, but the model takes 1 to 4"):
        encode_pair(subject, _asked(("a", "abcde"))[0], 4)
    with pytest.raises(ValueError, match="document 0 of piqa has a continuation of 0 tokens"):
        encode_pair(subject, _asked(("a", ""))[0], 4)
    model, _ = load_model(run)
    letters = json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 999}, "unk_token": "a"}})
    subject = scoring_model_of(model, Tokenizer("letters", letters), {})
    with pytest.raises(ValueError, match="has no context, and the tokenizer has no end-of-text token"):
        encode_pair(subject, _asked(("", "a"))[0], 4)
    words = Tokenizer("words", letters.replace('"a": 0', '"</s>": 0, "a": 1'))
    with pytest.raises(ValueError, match="has token 999, beyond the model's vocabulary of 320"):
        encode_pair(scoring_model_of(model, words, {}), _asked(("", "b"))[0], 4)


# Tasks


def test_local_copies_ask_what_the_harness_asks(tmp_path):
    """Its own templates, on documents as its own datasets have them."""
    harness = Path(import_module("lm_eval").__file__).parent / "tasks"
    render = import_module("lm_eval.utils").apply_template
    originals = {
        "arc_easy": ("arc/arc_easy.yaml", {"question": "Why?"}, {"query": "Question: Why?"}),
        "piqa": ("piqa/piqa.yaml", {"goal": "boil  an egg"}, {"query": "Question: boil  an egg\n"}),
        "boolq": (
            "super_glue/boolq/default.yaml",
            {"passage": "Eggs.", "question": "are they"},
            {"query": "Passage: Eggs.\nQuestion: are they?"},
        ),
        "lambada_openai": ("lambada/lambada_openai.yaml", {"text": "I do not care"}, {}),
    }
    for task, (file, document, local) in originals.items():
        template = yaml.safe_load((harness / file).read_text())
        last_word = {"context": "I do not", "continuation": "care"}
        _write(tmp_path / f"{task}.jsonl", [{**local, "choices": ["no", "yes"], "gold": 1} if local else last_word])
        write_requests(TasksConfig((task,), str(tmp_path)), tmp_path / "requests.jsonl")
        _, asked = read_requests(tmp_path / "requests.jsonl")
        assert {request.context for request in asked} == {render(template["doc_to_text"], document)}
        wanted = [" no", " yes"] if local else [render(template["doc_to_target"], document)]
        assert [request.continuation for request in asked] == wanted


def test_race_is_asked_as_it_is_written(data, tmp_path):
    line = write_requests(TasksConfig(("race", "piqa"), data, limit=2), tmp_path / "requests.jsonl")
    _, asked = read_requests(tmp_path / "requests.jsonl")
    assert [r.continuation for r in asked[:4]] == [" aaa", " zzz", " zzz", " zzz"]
    assert asked[0].context == "Article: number 0?"
    assert line.startswith("12 requests (race 8, piqa 4) in ")


def test_random_baselines_are_the_papers(run, data, tmp_path):
    results = _evaluate([run], data, tmp_path)
    assert results.random == {"arc_easy": 0.25, "lambada_openai": 0.0, "race": 0.25, "piqa": 0.5, "boolq": 0.5}
    assert str(results).splitlines()[1].split() == ["random", "25.0", "0.0", "25.0", "50.0", "50.0", "30.0"]
    assert json.loads((tmp_path / "results.json").read_text())["average_random"] == pytest.approx(0.3)


def test_model_that_likes_the_right_answers_scores_one_and_its_opposite_zero(data, tmp_path):
    """a follows a and a space, so that the wrong answers, made of z, are unlikely; a space follows b, for LAMBADA."""
    good = _chain(tmp_path / "good", {"b": " ", " ": "a", "a": "a"})
    bad = _chain(tmp_path / "bad", {" ": "z", "z": "z"})
    results = _evaluate([good, bad], data, tmp_path / "out")
    (_, of_good), (_, of_bad) = results.models
    assert {task: numbers["acc"] for task, numbers in of_good.items()} == {task: Number(1.0, 0.0) for task in TASKS}
    assert {task: numbers["acc"].value for task, numbers in of_bad.items()} == dict.fromkeys(TASKS, 0.0)
    assert of_good["arc_easy"]["acc_norm"] == Number(1.0, 0.0)
    assert of_good["lambada_openai"]["perplexity"].value == pytest.approx(1.0, abs=0.01)
    assert of_bad["lambada_openai"]["perplexity"].value > 100
    assert str(results).splitlines()[2].split()[1:] == ["100.0", "±", "0.0"] * 6


def test_standard_errors_are_those_of_the_harness(tmp_path):
    """Right on 4 of 6: those whose right answer is made of a's."""
    lines = [_choices(f"Question: {n}?", 0, 2) | {"gold": int(n >= 4)} for n in range(6)]
    _write(tmp_path / "piqa.jsonl", lines)
    good = _chain(tmp_path / "good", {" ": "a", "a": "a"})
    ((_, numbers),) = _evaluate([good], str(tmp_path), tmp_path / "out", ("piqa",)).models
    assert numbers["piqa"]["acc"].value == pytest.approx(4 / 6)
    assert numbers["piqa"]["acc"].stderr == pytest.approx(math.sqrt(4 / 6 * 2 / 6 / 5))  # Bessel's correction: 6 - 1
    peer = import_module("lm_eval.api.metrics").mean_stderr([1, 1, 1, 1, 0, 0])
    assert numbers["piqa"]["acc"].stderr == pytest.approx(peer)
    ((_, single),) = _evaluate([good], str(tmp_path), tmp_path / "one", ("piqa",), limit=1).models
    with pytest.raises(
        ValueError, match=r"other questions \(there and here: piqa, limit None; piqa, limit 1\): choose another"
    ):
        _evaluate([good], str(tmp_path), tmp_path / "out", ("piqa",), limit=1)
    assert single["piqa"]["acc"] == Number(1.0, None)


def test_average_counts_tasks_alike():
    assert with_average([Number(0.2, 0.03), Number(0.6, 0.04)])[-1] == Number(pytest.approx(0.4), pytest.approx(0.025))
    assert with_average([Number(0.2, 0.03), Number(0.6, None)])[-1].stderr is None


# Steps


def test_one_command_equals_three_steps(run, gpt2, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main sets its own
    asked = ["--tasks", *TASKS, "--data-dir", data]
    cli.main(["eval", run, gpt2, *asked, "--out", "one", "--device", "cpu"])
    shown = capsys.readouterr().out
    cli.main(["eval", "requests", *asked, "--out", "r.jsonl"])
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "lm_eval", None)
        cli.main(["eval", "score", gpt2, "--requests", "r.jsonl", "--out", "b.jsonl", "--device", "cpu"])
        without.setitem(sys.modules, "transformers", None)
        cli.main(["eval", "score", run, "--requests", "r.jsonl", "--out", "a.jsonl", "--device", "cpu"])
    capsys.readouterr()
    cli.main(["eval", "table", "--requests", "r.jsonl", "--scores", "a.jsonl", "b.jsonl", "--out", "three"])
    assert capsys.readouterr().out == shown.replace("one/results", "three/results")
    for name in ("results.json", "table.md", "table.csv"):
        assert Path("three", name).read_text() == Path("one", name).read_text()
    results, (of_run, of_gpt2) = json.loads(Path("one/results.json").read_text()), read_rows(Path("one/table.csv"))
    config = RunConfig.from_json(Path(run, "config.json").read_text())
    model = results["models"][0]
    assert (model["folder"], model["config_id"], model["step"]) == (run, config.id, 5)
    assert {"torch", "smupar"} <= model["versions"].keys()
    assert results["versions"]["lm_eval"] == import_module("lm_eval").__version__
    assert (of_run["config_id"], of_gpt2["config_id"]) == (config.id, "")
    assert float(of_run["piqa"]) == pytest.approx(model["results"]["piqa"]["acc"]["value"], rel=1e-4)
    assert model["results"]["race"].keys() == {"acc", "acc_norm"}
    assert model["results"]["lambada_openai"].keys() == {"acc", "perplexity"}
    assert "| random | 25.0 | 0.0 | 25.0 | 50.0 | 50.0 | 30.0 |" in Path("one/table.md").read_text()


def read_rows(path):
    """The rows of the models, without the first row, which is chance."""
    return list(csv.DictReader(path.read_text().splitlines()))[1:]


def test_run_checkpoint_and_export_score_alike(run, data, tmp_path):
    export(ExportConfig(run, str(tmp_path / "export")))
    folders = [run, f"{run}/checkpoints/step-00000005", str(tmp_path / "export")]
    results = _evaluate(folders, data, tmp_path / "out")
    rows = [numbers for _, numbers in results.models]
    assert rows[0] == rows[1]
    assert [about["config_id"] is None for about, _ in results.models] == [False, False, True]
    for task in TASKS:
        assert rows[2][task]["acc"] == rows[0][task]["acc"]


def test_scores_go_on_where_they_were(run, data, tmp_path):
    first, whole, out = tmp_path / "first.jsonl", tmp_path / "whole.jsonl", tmp_path / "scores.jsonl"
    write_requests(TasksConfig(("piqa",), data, limit=2), first)
    write_requests(TasksConfig(("piqa", "boolq"), data), whole)
    assert "4 scores, 0 already computed" in score_file(run, first, out, ON_CPU)
    begun = out.read_text()
    with out.open("a") as file:
        file.write('{"task": "piqa", "doc": 2, "ind')  # killed here
    assert "20 scores, 4 already computed" in score_file(run, whole, out, ON_CPU)
    assert out.read_text().startswith(begun)
    assert "0 scores, 24 already computed" in score_file(run, whole, out, ON_CPU)
    score_file(run, whole, tmp_path / "at_once.jsonl", ON_CPU)
    together, (_, at_once) = read_scores(out)[1], read_scores(tmp_path / "at_once.jsonl")
    assert together.keys() == at_once.keys()
    for key, answer in at_once.items():
        assert together[key].loglikelihood == pytest.approx(answer.loglikelihood, rel=1e-5)


def test_scores_of_another_model_or_length_are_not_added_to(run, gpt2, data, tmp_path):
    requests, out = tmp_path / "requests.jsonl", tmp_path / "scores.jsonl"
    write_requests(TasksConfig(("piqa",), data, limit=1), requests)
    score_file(run, requests, out, ON_CPU)
    with pytest.raises(ValueError, match=r"holds scores of .* with weights .*: choose another --out"):
        score_file(gpt2, requests, out, ON_CPU)
    with pytest.raises(ValueError, match="with max_length 2048, not 100: choose another --out"):
        score_file(run, requests, out, ScoringConfig(device="cpu", max_length=100))


# Bad input


def test_unknown_task_and_impossible_numbers_raise():
    with pytest.raises(ValueError, match="unknown task 'hellaswag': choose among arc_easy, lambada_openai, race, piqa, boolq"):
        TasksConfig(("piqa", "hellaswag"))
    with pytest.raises(ValueError, match="--tasks names each task once"):
        TasksConfig(("piqa", "piqa"))
    with pytest.raises(ValueError, match="limit must be a positive whole number"):
        TasksConfig(limit=0)
    with pytest.raises(ValueError, match="batch_size must be a positive whole number"):
        ScoringConfig(batch_size=0)
    with pytest.raises(ValueError, match="no model: give the folder of a run"):
        EvalConfig(())
    with pytest.raises(ValueError, match="a folder is given twice"):
        EvalConfig(("a", "a"))


def test_missing_copy_raises_with_its_path_and_form(tmp_path):
    with pytest.raises(
        ValueError, match=r"no file .*race\.jsonl: every line should be like .*\"query\".*\"choices\".*\"gold\""
    ):
        load_tasks(TasksConfig(("race",), str(tmp_path)))
    with pytest.raises(ValueError, match=r"no file .*lambada_openai\.jsonl: every line should be like .*\"continuation\""):
        load_tasks(TasksConfig(("lambada_openai",), str(tmp_path)))


@pytest.mark.parametrize(
    "line",
    [
        "{not json",
        '"text"',
        '{"query": "a", "choices": ["b", "c"]}',
        '{"query": "a", "choices": ["b", "c"], "gold": 2}',
        '{"query": "a", "choices": ["b", "c"], "gold": true}',
        '{"query": "a", "choices": ["b"], "gold": 0}',
        '{"query": "a", "choices": ["b", ""], "gold": 0}',
        '{"query": null, "choices": ["b", "c"], "gold": 0}',
        '{"context": "a", "continuation": "b"}',
    ],
)
def test_malformed_line_raises_with_its_number(tmp_path, line):
    _write(tmp_path / "piqa.jsonl", [_choices("Question: a", 0, 2), "", line])
    with pytest.raises(ValueError, match=r"piqa\.jsonl, line 3.*every line should be like"):
        read_documents("piqa", str(tmp_path))


def test_empty_copy_raises(tmp_path):
    _write(tmp_path / "piqa.jsonl", [])
    with pytest.raises(ValueError, match=r"piqa\.jsonl is empty"):
        read_documents("piqa", str(tmp_path))


def test_folder_without_a_model_raises(data, gpt2, tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match="holds no model: give a run, a checkpoint, an export, or a folder that transf"):
            load_scoring_model(folder, CPU)
    shutil.copy(Path(gpt2) / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"transformers cannot read .*: give a causal model and its tokenizer"):
        load_scoring_model(tmp_path, CPU)


def test_missing_harness_raises_with_the_remedy(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.task", None)
    with pytest.raises(ModuleNotFoundError, match=r"smupar eval needs lm_eval: pip install 'smupar\[eval\]'"):
        write_requests(TasksConfig(("piqa",), data), tmp_path / "requests.jsonl")


def test_table_of_other_requests_or_documents_raises(run, data, tmp_path):
    copies = shutil.copytree(data, tmp_path / "copies")
    piqa, both, out = tmp_path / "piqa.jsonl", tmp_path / "both.jsonl", tmp_path / "scores.jsonl"
    write_requests(TasksConfig(("piqa",), str(copies)), piqa)
    write_requests(TasksConfig(("piqa", "boolq"), str(copies)), both)
    score_file(run, piqa, out, ON_CPU)
    with pytest.raises(ValueError, match=r"lacks 12 of the 24 scores .*the first is document 0 of boolq: smupar eval score "):
        tabulate(both, [out], tmp_path / "table")
    documents = read_documents("piqa", str(copies))
    _write(copies / "piqa.jsonl", [*documents[:-1], documents[-1] | {"gold": 0}])
    with pytest.raises(ValueError, match=r"was made from other documents than .*copies: make and score it again"):
        tabulate(piqa, [out], tmp_path / "table")
    results = tabulate(piqa, [out], tmp_path / "table", data_dir=data)
    assert results.documents == {"piqa": 6}


def test_files_of_another_kind_raise_with_the_remedy(run, tmp_path):
    requests = tmp_path / "requests.jsonl"
    with pytest.raises(ValueError, match=r"no file .*requests\.jsonl: make it with smupar eval requests"):
        read_requests(requests)
    write_request_file(requests, {"tasks": ["piqa"]}, _asked(("a", "b")))
    with pytest.raises(ValueError, match="does not begin with smupar-scores/1: make it with smupar eval score"):
        read_scores(requests)
    with requests.open("a") as file:
        file.write('{"task": "piqa"}\n')
    with pytest.raises(
        ValueError, match=r"requests\.jsonl, line 3: expected task, doc, index, context, continuation, got task"
    ):
        read_requests(requests)


def test_changed_or_missing_lines_are_named(run, data, tmp_path):
    """A digit of a score, a letter of a question, a question that is gone."""
    requests, scores = tmp_path / "requests.jsonl", tmp_path / "scores.jsonl"
    write_requests(TasksConfig(("piqa",), data), requests)
    score_file(run, requests, scores, ON_CPU)
    asked, answered = requests.read_text(), scores.read_text()
    lines = asked.splitlines(keepends=True)
    for path, content, said in (
        (requests, asked.replace(" zzz", " zzy", 1), r"requests\.jsonl, line \d+, is damaged \(its content does not match"),
        (
            requests,
            "".join(lines[:-1]),
            r"requests\.jsonl is damaged \(11 requests, expected 12\): make it with smupar eval req",
        ),
        (requests, lines[0].replace('"limit"', '"limits"') + "".join(lines[1:]), r"requests\.jsonl, line 1, is damaged"),
        (
            requests,
            '{"format": "smupar-requests/1"}\n' + "".join(lines[1:]),
            r"requests\.jsonl .*the field 'data_dir' is missing",
        ),
        (scores, answered.replace('"loglikelihood": -', '"loglikelihood": -1', 1), r"scores\.jsonl, line 2, is damaged"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=said):
            tabulate(requests, [scores], tmp_path / "table")
        requests.write_text(asked)
        scores.write_text(answered)
    assert tabulate(requests, [scores], tmp_path / "table").documents == {"piqa": 6}


def test_diverged_model_raises(tmp_path):
    folder = _chain(tmp_path / "broken", {"a": "b"})
    requests = tmp_path / "requests.jsonl"
    write_request_file(requests, {"tasks": ["piqa"]}, _asked(("a", "b")))
    weights = {name: tensor.clone() for name, tensor in load_model(folder)[0].named_parameters()}
    save_file({name: torch.full_like(tensor, math.nan) for name, tensor in weights.items()}, Path(folder) / "model.safetensors")
    with pytest.raises(ValueError, match="gives document 0 of piqa a loglikelihood that is not finite: has the model diverged"):
        score_file(folder, requests, tmp_path / "scores.jsonl", ON_CPU)
