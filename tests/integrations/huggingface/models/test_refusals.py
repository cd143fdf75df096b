"""Models, folders and versions that are refused, and how."""

import importlib.util
import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2LMHeadModel, LlamaConfig

import smupar
from smupar.cli.main import main
from smupar.integrations import huggingface
from smupar.lm.use.score import load_scoring_model
from smupar.model.attached import is_parameterized
from tests.integrations.huggingface.tiny import LLAMA, build, trained
from tests.support.loops import assert_same_tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    model = build("gpt2")
    huggingface.parameterize(model, base=32, density=0.5)
    model.save_pretrained(path)
    return path


def spoiled(kind, spoil):
    def make():
        model = build(kind)
        spoil(model)
        return model

    return make


def quantize(model):
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def add_lora(model):
    model.model.layers[0].self_attn.q_proj.lora_A = torch.nn.Linear(64, 4, bias=False)  # as PEFT names it


MODELS = {
    "quantized": (spoiled("gpt2", quantize), 32, "quantized"),
    "LoRA": (spoiled("llama", add_lora), 32, r"LoRA.*merge_and_unload"),
    "no model": (lambda: torch.nn.Linear(2, 2), 32, r"a Linear is not a model of transformers: use smupar\.parameterize"),
    "wrapped": (lambda: torch.nn.DataParallel(build("gpt2")), 32, "parameterize first, then compile or wrap it"),
    "base of another architecture": (
        lambda: build("gpt2"),
        LlamaConfig(**LLAMA),
        "config is for a 'llama', but the model is a 'gpt2'",
    ),
}


@pytest.mark.parametrize(("make", "base", "message"), MODELS.values(), ids=MODELS)
def test_models_that_cannot_be_parameterized_are_refused_unchanged(make, base, message):
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        huggingface.parameterize(model, base=base)
    assert_same_tensors(model.state_dict(), before)
    assert not is_parameterized(model)


def test_second_parameterize_is_refused():
    model = build("gpt2")
    huggingface.parameterize(model, base=32)
    with pytest.raises(ValueError, match="parameterized already"):
        huggingface.parameterize(model, base=32)


def lose(name):
    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def write(name, content):
    return lambda folder: (folder / name).write_text(content)


def rename_class(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["MyGPT2"]}))


def cut_weights(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])


FOLDERS = {
    "no plan": (lambda folder: (folder / "smupar_plan.json").unlink(), r"no smupar_plan.json.*from_pretrained"),
    "empty plan": (write("smupar_plan.json", ""), r"smupar_plan.json is .*write it again"),
    "plan without fields": (write("smupar_plan.json", "{}"), r"smupar_plan.json is .*write it again"),
    "plan without rows": (write("smupar_plan.json", '{"format": "smupar-plan/1"}'), r"smupar_plan.json is .*write it again"),
    "lost weight": (lose("transformer.ln_f.weight"), r"incomplete: it lacks 'transformer.ln_f.weight'"),
    "lost mask": (lose("transformer.h.0.mlp.c_fc.weight_mask"), r"incomplete: it lacks 'transformer.h.0.mlp.c_fc.weight_mask'"),
    "damaged weights": (cut_weights, "weights are damaged"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"no model\.safetensors"),
    "unknown class": (rename_class, r"no class called MyGPT2.*model_class="),
}


@pytest.mark.parametrize(("damage", "message"), FOLDERS.values(), ids=FOLDERS)
def test_folders_that_cannot_be_loaded_say_what_is_wrong(folder, tmp_path, damage, message):
    out = shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("sums.json"))  # which would tell first
    damage(out)
    with pytest.raises(ValueError, match=message):
        huggingface.load(out)
    if damage is rename_class:
        assert type(huggingface.load(out, model_class=GPT2LMHeadModel)[0]) is GPT2LMHeadModel


def test_export_command_refuses_what_it_cannot_do(folder, tmp_path, capsys):
    for flags in (["--format", "sparse"], ["--best"]):
        with pytest.raises(SystemExit, match="2"):
            main(["export", str(folder), str(tmp_path / "out"), *flags])
        assert "reads dense weights: leave out" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(folder), str(tmp_path)])
    assert "exists already" in capsys.readouterr().err


def test_scoring_a_folder_that_needs_its_plan_is_refused(folder):
    with pytest.raises(ValueError, match="smupar export"):
        load_scoring_model(folder, torch.device("cpu"))


def import_anew(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("smupar.integrations.huggingface")]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("smupar.integrations.huggingface")


@pytest.mark.parametrize("version", ["4.57.1", "6.0.0", "unknown"])
def test_other_versions_of_transformers_are_refused(version, monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ImportError, match=rf"transformers 5\.x, this is {version}: pip install 'smupar\[hf\]'"):
        import_anew(monkeypatch)


def test_missing_transformers_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'smupar\[hf\]'"):
        import_anew(monkeypatch)


def test_names_are_found_and_others_are_not():
    assert [name for name in dir(huggingface) if not callable(getattr(huggingface, name))] == []
    with pytest.raises(AttributeError, match="no attribute 'from_pretrained'"):
        _ = huggingface.from_pretrained


def test_pretrained_weights_are_not_lost_in_silence(folder):
    model = GPT2LMHeadModel.from_pretrained(folder)
    with pytest.warns(smupar.PlanWarning, match="replaced by a fresh init"):
        huggingface.parameterize(model, base=32)


def test_export_in_another_dtype_is_refused(tmp_path):
    with pytest.raises(ValueError, match="dtype must be one of fp32, bf16, got 'fp16'"):
        huggingface.export(tmp_path, tmp_path / "plain", dtype="fp16")


def test_pushing_without_the_plan_is_refused(tmp_path):
    model, _ = trained("gpt2")
    with pytest.raises(ValueError, match=r"use model\.push_to_hub"):
        model.save_pretrained(tmp_path, push_to_hub=True)
