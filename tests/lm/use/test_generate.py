"""Sampling from a run that was trained for five steps, and from a model that is a known chain of tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from smupar.lm.config.commands import ExportConfig, GenerateConfig
from smupar.lm.config.run_config import Execution, ModelConfig
from smupar.lm.model.gpt import GPT
from smupar.lm.run.train import train
from smupar.lm.use.export import export
from smupar.lm.use.generate import choose, generate, of_gpt, sample, sample_texts
from smupar.lm.use.load import load_model, load_run
from tests.lm.use.tiny import chain, trained_run

TEXT = b"Tune a small dense model, train wide sparse ones with the same hyperparameters. " * 50
PROMPT = [84, 117, 110, 101]  # "Tune"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained_run(tmp_path_factory.mktemp("run"), TEXT)


@pytest.fixture
def model(run):
    """A copy of its own for each test, which may change it."""
    return load_model(run)[0]


def _config(folder="", **options):
    return GenerateConfig(folder, device="cpu", **options)


def _sampled(model, *, vocab_size=256, **options):
    return list(sample(model, PROMPT, _config(**options), vocab_size=vocab_size))


def _logits(model, ids):
    """Logits of the next token, by hand: the last hidden state times the tied matrix, alpha_output 1.095 over a width of 2."""
    hidden = []
    handle = model.norm.register_forward_hook(lambda module, args, output: hidden.append(output))
    with torch.no_grad():
        model(torch.tensor([ids]))
        handle.remove()
        return 1.095 / 2 * hidden[0][0, -1] @ model.embedding.weight[:256].T


# Tokens


def test_greedy_generation_is_the_argmax_over_the_whole_text_each_time(model):
    ids = list(PROMPT)
    for token in _sampled(model, tokens=40, temperature=0.0):
        with torch.no_grad():
            assert token == model(torch.tensor([ids]))[0, -1, :256].argmax()
        ids.append(token)
    assert len(ids) == 44


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_are_drawn_from_logits_with_the_output_factor(model, temperature):
    ids, rng = list(PROMPT), torch.Generator().manual_seed(3)
    for _ in range(100):
        shares = torch.softmax(_logits(model, ids) / temperature, 0)
        ids.append(int(torch.multinomial(shares, 1, generator=rng)))
    assert _sampled(model, tokens=100, temperature=temperature, top_k=0, seed=3) == ids[4:]


def test_mode_of_the_model_does_not_matter(model):
    model.train()
    in_training = _sampled(model, tokens=20)
    assert _sampled(model.eval(), tokens=20) == in_training


def test_temperature_zero_is_the_same_for_every_seed(model):
    greedy = [_sampled(model, tokens=30, temperature=0.0, seed=seed) for seed in (0, 1)]
    assert greedy[0] == greedy[1]


def test_seeds_give_different_texts_and_the_same_one_again(model):
    texts = [tuple(_sampled(model, tokens=30, seed=seed)) for seed in (0, 1, 2, 0)]
    assert texts[0] == texts[3]
    assert len(set(texts)) == 3


def test_one_candidate_is_greedy_at_any_temperature(model):
    assert _sampled(model, tokens=30, top_k=1, temperature=5.0) == _sampled(model, tokens=30, temperature=0.0)


def test_chosen_tokens_are_among_the_top_k(model):
    ids, ranks = list(PROMPT), []
    for token in _sampled(model, tokens=60, top_k=5, temperature=50.0):
        ranks.append(int((_logits(model, ids) > _logits(model, ids)[token] + 1e-5).sum()))
        ids.append(token)
    assert max(ranks) == 4  # at this temperature all five come about equally often
    assert len(set(ranks)) == 5


def test_choices_have_the_shares_of_the_softmax():
    logits = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    rng = torch.Generator().manual_seed(0)

    def shares(**options):
        tokens = [int(choose(logits[None], _config(**options), [rng])) for _ in range(4000)]
        return np.bincount(tokens, minlength=4) / 4000

    assert shares(temperature=1.0, top_k=0) == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.03)
    assert shares(temperature=1.0, top_k=2) == pytest.approx([0, 0, 3 / 7, 4 / 7], abs=0.03)
    assert shares(temperature=0.5, top_k=99) == pytest.approx(np.array([1, 4, 9, 16]) / 30, abs=0.03)


def test_ids_beyond_the_tokenizer_are_never_chosen(model):
    def favour_padding(module, args, output):
        output[..., 256:] += 1000
        return output

    model.unembedding.register_forward_hook(favour_padding)
    assert min(_sampled(model, tokens=20, vocab_size=320)) >= 256
    for options in ({"temperature": 0.0}, {"top_k": 0}, {"top_k": 5}):
        assert max(_sampled(model, tokens=20, **options)) < 256


# Text


def test_text_is_the_prompt_and_the_decoded_tokens(run, model):
    pieces = list(generate(_config(run, prompt="Tune", tokens=30, seed=1, top_k=20)))
    tokens = _sampled(model, tokens=30, seed=1, top_k=20)
    end = tokens.index(0) if 0 in tokens else 30
    assert pieces[0] == "Tune"
    assert "".join(pieces) == bytes([*PROMPT, *tokens[:end]]).decode(errors="replace").rstrip("\ufffd")


def test_bytes_that_the_locale_could_not_decode_are_read_as_utf_8(run):
    said = "".join(generate(_config(run, prompt=("\udcc3\udc9f",), tokens=1)))
    assert said == "".join(generate(_config(run, prompt=("ß",), tokens=1)))
    assert "".join(generate(_config(run, prompt=("\udcff",), tokens=1))).startswith("\ufffd")


def test_generation_from_a_run_and_from_its_checkpoint_agree(run):
    last = load_run(run).step
    checkpoint = f"{run}/checkpoints/step-{last:08d}"
    assert last == 5
    texts = ["".join(generate(_config(folder, prompt="a", tokens=20))) for folder in (run, checkpoint)]
    assert texts[0] == texts[1]


def test_text_follows_the_chain_and_stops_at_the_end_of_text(tmp_path):
    folder = chain(tmp_path / "abc", {97: 98, 98: 99, 99: 0})  # a, b, c, NUL
    assert list(generate(_config(folder, prompt="xa", tokens=20, temperature=0.0))) == ["xa", "b", "c"]
    assert list(generate(_config(folder, prompt="a", tokens=1, temperature=0.0))) == ["a", "b"]


def test_half_a_character_waits_for_its_rest(tmp_path):
    folder = chain(tmp_path / "accent", {102: 0xC3, 0xC3: 0xA9, 0xA9: 33, 33: 0})  # f, both bytes of é, !
    assert list(generate(_config(folder, prompt="caf", tokens=20, temperature=0.0))) == ["caf", "é", "!"]


def test_tokens_of_several_bytes_are_shown_as_in_the_whole_text(tmp_path):
    following = {102: 0xE2, 0xE2: 0x82, 0x82: 0xAC, 0xAC: 102}  # f and the three bytes of a euro sign, again and again
    folder = chain(tmp_path / "euro", following)
    assert list(generate(_config(folder, prompt="f", tokens=9, temperature=0.0))) == ["f", "€", "f", "€", "f", "\ufffd"]


# Several prompts, other folders


@pytest.mark.parametrize("positions", ["alibi", "rotary", "learned", "none"])
def test_texts_of_a_batch_are_those_of_each_prompt_alone(positions):
    torch.manual_seed(0)
    model = GPT(ModelConfig(width=64, depth=2, head_dim=16, positions=positions)).eval()
    prompts, config = [[1, 2, 3, 4, 5, 6, 7], [9], [200, 100, 50]], _config(tokens=30)
    together = list(zip(*sample_texts(of_gpt(model), prompts, config, vocab_size=256), strict=True))
    alone = [tuple(sample(model, prompt, config, vocab_size=256)) for prompt in prompts]
    assert together == alone


def test_several_prompts_are_numbered_and_end_on_their_own(tmp_path):
    folder = chain(tmp_path / "abc", {97: 98, 98: 99, 99: 0, 120: 120})
    pieces = list(generate(_config(folder, prompt=("xa", "b", "x"), tokens=4, temperature=0.0)))
    assert pieces == ["--- 1 of 3\nxabc\n", "--- 2 of 3\nbc\n", "--- 3 of 3\nxxxxx\n"]


def test_packed_and_dense_give_the_same_text(run, tmp_path):
    sparse = str(tmp_path / "sparse")
    export(ExportConfig(run, out=sparse, format="sparse"))
    texts = {
        "".join(generate(_config(folder, prompt="Tune", tokens=30, storage=storage)))
        for folder in (run, sparse)
        for storage in ("dense", "packed", "auto")
    }
    assert len(texts) == 1


def test_run_that_was_trained_without_its_zeros_generates_like_its_dense_twin(run, tmp_path):
    config, twin = load_run(run).config, str(tmp_path / "csr")
    train(config, Execution(out=twin, device="cpu", storage="csr", peak_tflops=1.0))
    texts = {"".join(generate(_config(folder, prompt="Tune", tokens=30, temperature=0.0))) for folder in (run, twin)}
    assert len(texts) == 1


def test_model_of_transformers_gives_the_text_of_its_own_generate(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["<end>", *"abcdefg"])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=8, n_positions=16, n_embd=32, n_layer=2, n_head=2, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.transformer.h.parameters():
            parameter.mul_(torch.rand_like(parameter) < 0.5)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    expected = []
    for prompt in ("a b c", "d"):
        given = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**given, max_new_tokens=6, do_sample=False, pad_token_id=0)[0].tolist()
        expected.append(tokenizer.decode(ids[: ids.index(0)] if 0 in ids else ids))
    for storage in ("dense", "packed"):
        options = {"tokens": 6, "temperature": 0.0, "storage": storage}
        assert "".join(generate(_config(str(tmp_path), prompt="a b c", **options))) == expected[0]
        together = list(generate(_config(str(tmp_path), prompt=("a b c", "d"), **options)))
        assert [text.split("\n")[1] for text in together] == expected
    with pytest.raises(ValueError, match="positions for 16 tokens, but the prompt has 3: pass --tokens 13 or fewer"):
        next(generate(_config(str(tmp_path), prompt="a b c", tokens=14)))


# Bad input


def test_impossible_options_raise(run):
    for options in ({"tokens": 0}, {"temperature": -1.0}, {"top_k": -1}):
        with pytest.raises(ValueError, match="--tokens must be above 0, --temperature and --top-k at least 0"):
            _config(run, **options)
    with pytest.raises(ValueError, match="the prompt is empty: give at least one character with --prompt"):
        _config(run, prompt="")


def test_model_without_zeros_cannot_be_packed(tmp_path):
    torch.manual_seed(0)
    folder = chain(tmp_path / "full", {97: 97})
    tensors = load_file(f"{folder}/model.safetensors")
    save_file({name: torch.ones_like(tensor) for name, tensor in tensors.items()}, f"{folder}/model.safetensors")
    with pytest.raises(ValueError, match=r"no layer can be packed .*hardly any zeros.*use dense"):
        next(generate(_config(folder, storage="packed")))
    assert next(generate(_config(folder, prompt="a"))) == "a"


def test_more_tokens_than_learned_positions_raise_with_the_number_left(tmp_path):
    folder = chain(tmp_path / "short", {97: 97}, positions="learned", context=10)
    assert "".join(generate(_config(folder, prompt="aaa", tokens=7, temperature=0.0))) == "a" * 10
    with pytest.raises(ValueError, match="positions for 10 tokens, but the prompt has 3: pass --tokens 7 or fewer"):
        list(generate(_config(folder, prompt="aaa", tokens=8)))


def test_folder_that_is_no_run_raises_with_the_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*none: give the folder of a run"):
        next(generate(_config(str(tmp_path / "none"))))
    with pytest.raises(FileNotFoundError, match="is not the folder of a run: it has no config"):
        next(generate(_config(str(tmp_path))))


def test_run_without_a_checkpoint_raises_with_the_remedy(run, tmp_path):
    config = load_run(run).config
    (tmp_path / "config.json").write_text(replace(config, seed=1).to_json())
    with pytest.raises(FileNotFoundError, match="has no checkpoint yet: continue the run"):
        next(generate(_config(str(tmp_path))))
