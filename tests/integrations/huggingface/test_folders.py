"""Generation, folders and exports."""

import copy
import json

import pytest
import torch
from transformers import GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import smupar
from smupar.cli.main import main
from smupar.integrations import huggingface
from smupar.model.attached import mask_of
from smupar.output.checksums import UncheckedWarning
from smupar.study.verify import verify
from tests.integrations.huggingface.tiny import EVERY_KIND, LLAMA, build, inputs, labelled, logits, trained


def generate(model, kind):
    given = {name: tensor[:, :4] for name, tensor in inputs(kind).items()}
    return model.generate(**given, max_new_tokens=6, do_sample=False, eos_token_id=None, return_dict_in_generate=True,
                          output_logits=True)  # fmt: skip


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_saved_loaded_and_exported_models_give_the_same_logits(kind, tmp_path):
    model, plan = trained(kind)
    wanted = logits(model, kind)
    model.save_pretrained(tmp_path / "sparse")
    again, same_plan = huggingface.load(tmp_path / "sparse")
    assert same_plan.diff(plan) == []
    assert smupar.audit(again, same_plan, trained=True) == []
    assert torch.equal(logits(again, kind), wanted)
    own, read = model.state_dict(), again.state_dict()
    assert own.keys() == read.keys()
    assert all(torch.equal(own[name], read[name]) for name in own)

    main(["export", str(tmp_path / "sparse"), str(tmp_path / "plain")])
    plain, seen = type(model).from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not any(seen.values())  # no key missing, none too many
    torch.testing.assert_close(logits(plain, kind), wanted, rtol=1e-4, atol=1e-5)
    naive = type(model).from_pretrained(tmp_path / "sparse")
    assert (logits(naive, kind) - wanted).abs().max() > 0.1  # what the export is for
    for row in plan:
        if row.masked:
            assert not plain.get_parameter(row.name)[~mask_of(model, row.name)].any()

    if model.can_generate():
        tokens = generate(model, kind)
        # One token at a time, with a cache, the factors are there as well.
        with torch.no_grad():
            at_once = model(tokens.sequences).logits[:, 3:-1]
        torch.testing.assert_close(torch.stack(tokens.logits, 1), at_once, rtol=1e-4, atol=1e-4)
        assert torch.equal(generate(again, kind).sequences, tokens.sequences)
        assert torch.equal(generate(plain, kind).sequences, tokens.sequences)


def test_export_of_equal_factors_stays_tied(tmp_path):
    model, _ = trained("gpt2", rule="sp")
    model.save_pretrained(tmp_path / "sparse")
    huggingface.export(tmp_path / "sparse", tmp_path / "plain", dtype="bf16")
    plain = GPT2LMHeadModel.from_pretrained(tmp_path / "plain")
    assert plain.lm_head.weight is plain.transformer.wte.weight
    assert plain.dtype == torch.bfloat16


@pytest.mark.parametrize(("dtype", "wanted"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_export_has_the_dtype_that_was_asked_for(dtype, wanted, tmp_path):
    model, _ = trained("gpt2")
    model.bfloat16().save_pretrained(tmp_path / "sparse")
    assert f", {dtype}, " in huggingface.export(tmp_path / "sparse", tmp_path / "plain", dtype=dtype)
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "plain").dtype == wanted


def test_loaded_model_trains_with_masked_gradients(tmp_path):
    model, _ = trained("gpt2")
    model.save_pretrained(tmp_path)
    again, plan = huggingface.load(tmp_path)
    again.train()
    again(**labelled("gpt2")).loss.backward()
    name = "transformer.h.0.mlp.c_fc.weight"
    mask, gradient = mask_of(again, name), again.get_parameter(name).grad
    assert gradient[mask].any()
    assert not gradient[~mask].any()
    assert plan[name].density == 0.5


def test_copy_saves_its_own_weights(tmp_path):
    model, plan = trained("gpt2")
    other = copy.deepcopy(model)
    smupar.attach(other, plan)
    with torch.no_grad():
        other.transformer.ln_f.weight.mul_(2)
    other.save_pretrained(tmp_path)
    again, _ = huggingface.load(tmp_path)
    assert torch.equal(again.transformer.ln_f.weight, other.transformer.ln_f.weight)


def test_model_in_several_files_is_loaded(tmp_path):
    model, _ = trained("llama")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert torch.equal(logits(huggingface.load(tmp_path)[0], "llama"), logits(model, "llama"))


def test_other_ranks_leave_the_plan_to_the_first(tmp_path):
    model, _ = trained("gpt2")
    model.save_pretrained(tmp_path, is_main_process=False)
    assert not list(tmp_path.iterdir())


def test_masks_that_pruning_added_are_loaded(tmp_path):
    model = build("llama")
    plan = huggingface.parameterize(model, base=32)
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=2**-6))
    sparsifier = smupar.GMP(model, plan, optimizer, density=0.25, every=1, stop=2)
    for _ in range(2):
        model(**labelled("llama")).loss.backward()
        optimizer.step()
        sparsifier.step()
    model.save_pretrained(tmp_path)
    again, same_plan = huggingface.load(tmp_path)
    assert torch.equal(logits(again, "llama"), logits(model, "llama"))
    mask = mask_of(again, "model.layers.0.mlp.up_proj.weight")
    assert int(mask.sum()) == mask.numel() // 4
    assert smupar.audit(again, same_plan, trained=True) == []


def test_model_that_keeps_only_non_zeros_is_saved_loaded_and_exported(tmp_path):
    model, plan = trained("llama")
    wanted = logits(model, "llama")
    smupar.sparsify_storage(model, plan, backend="csr")
    model.save_pretrained(tmp_path / "sparse")
    again, _ = huggingface.load(tmp_path / "sparse")
    assert smupar.audit(again, plan, trained=True) == []
    torch.testing.assert_close(logits(again, "llama"), wanted, rtol=1e-4, atol=1e-5)
    huggingface.export(tmp_path / "sparse", tmp_path / "plain")
    plain = type(model).from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(logits(plain, "llama"), wanted, rtol=1e-4, atol=1e-5)


def test_model_parameterized_by_hand_can_be_saved(tmp_path):
    model = build("gpt2")
    plan = smupar.parameterize(model, base=build("gpt2", 32), density=0.5)
    huggingface.set_attention_scale(model, plan)
    huggingface.save(model, plan, tmp_path)
    again, _ = huggingface.load(tmp_path, model_class=GPT2LMHeadModel)
    assert torch.equal(logits(again, "gpt2"), logits(model, "gpt2"))


def test_factors_on_residual_branches_are_exported(tmp_path):
    torch.manual_seed(0)
    deep, shallow = (LlamaConfig(**{**LLAMA, "num_hidden_layers": depth}) for depth in (4, 1))
    model = LlamaForCausalLM(deep).eval()
    branches = ["model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj"]
    plan = huggingface.parameterize(model, base=huggingface.base_config(shallow, 32), branches=branches)
    assert {factor for _, factor in plan.branches} == {1 / 4}
    model.save_pretrained(tmp_path / "sparse")
    huggingface.export(tmp_path / "sparse", tmp_path / "plain")
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(logits(plain, "llama"), logits(model, "llama"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "smupar_plan.json", "generation_config.json"])
def test_damaged_folder_of_a_model_is_named(tmp_path, name):
    model, _ = trained("gpt2")
    model.save_pretrained(tmp_path / "sparse")
    path = tmp_path / "sparse" / name
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"sparse is damaged \(.*{name} does not match its checksum\).*delete sums\.json if"):
        huggingface.load(tmp_path / "sparse")
    assert [name in line for line in verify(tmp_path / "sparse").wrong] == [True]
    data[-9] ^= 1
    path.write_bytes(data)
    (tmp_path / "sparse/sums.json").unlink()
    with pytest.warns(UncheckedWarning, match="sparse has no checksums"):
        huggingface.load(tmp_path / "sparse")


def test_exported_folder_has_checksums(tmp_path):
    model, _ = trained("gpt2")
    model.save_pretrained(tmp_path / "sparse")
    huggingface.export(tmp_path / "sparse", tmp_path / "plain")
    found = verify(tmp_path / "plain")
    assert (found.wrong, found.unchecked, found.counts["file"]) == ([], [], 3)
    (tmp_path / "plain/config.json").write_text("{}")
    assert len(verify(tmp_path / "plain").wrong) == 1


@pytest.mark.parametrize("command", ["export {folder} {folder}-out", "eval score {folder} --requests {folder}/requests.jsonl"])
def test_code_in_a_folder_is_not_run_even_if_somebody_would_say_yes(tmp_path, monkeypatch, capsys, command):
    """transformers asks at the terminal whether to run it."""
    model, _ = trained("gpt2")
    folder, proof = tmp_path / "model", tmp_path / "proof"
    model.save_pretrained(folder)
    code = (
        "import pathlib, transformers\npathlib.Path({!r}).touch()\nclass EvilConfig(transformers.PretrainedConfig):\n    pass\n"
    )
    (folder / "evil.py").write_text(code.format(str(proof)))
    config = json.loads((folder / "config.json").read_text())
    places = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "evil", "auto_map": places}))
    (folder / "sums.json").unlink()
    (folder / "requests.jsonl").write_text('{"format": "smupar-requests/1"}\n')
    if command.startswith("eval"):
        (folder / "smupar_plan.json").unlink()
    monkeypatch.setattr("builtins.input", lambda *args: "y")
    with pytest.raises(SystemExit) as ended:
        main(command.format(folder=folder).split())
    assert ended.value.code == 2
    assert "transformers cannot read" in capsys.readouterr().err
    assert not proof.exists()
