"""What a run reads: the split of its text, batches as a function of seed and step, and the order within an epoch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smupar.lm.config.run_config import ModelConfig, RunConfig, padded_vocab
from smupar.lm.data.batches import num_sequences, open_text, read_batch, shuffled, standard_library
from smupar.lm.data.shard_writer import write_tokens
from smupar.lm.data.shards import TokenizerInfo
from smupar.lm.data.tokens import Tokens
from smupar.lm.run.distributed import World

TINY = TokenizerInfo("tiny", 1000, None, "a" * 64)


def _counting(length):
    """0, 1, 2, ...: a token is its own position, and the target of an input is one more."""
    return Tokens([np.arange(length)])


def _starts(tokens, *, seed=0, seq_len, steps, batch_size):
    """Where the sequences of many steps begin, on counting text."""
    batches = [read_batch(tokens, seed=seed, step=step, batch_size=batch_size, seq_len=seq_len) for step in steps]
    return torch.cat([inputs[:, 0] for inputs, _ in batches]).tolist()


def _order(count, seed):
    """The order in which an epoch takes that many sequences, here of one token each."""
    tokens = _counting(count + 2)
    assert num_sequences(tokens, 1) == count
    starts = np.array(_starts(tokens, seed=seed, seq_len=1, steps=[0], batch_size=count))
    return starts - starts.min()


def _keys(seed):
    return np.random.default_rng(seed).integers(2**63, size=4)


def _folder(path, tokens, info=TINY, **options):
    write_tokens(path, np.asarray(tokens), info, **options)
    return str(path)


def _run(data, **options):
    return RunConfig(model=ModelConfig(vocab_size=options.pop("vocab_size", 1024)), data=data, seq_len=8, **options)


# Batches


def test_batches_are_a_function_of_seed_and_step():
    tokens, size = _counting(1000), {"batch_size": 4, "seq_len": 8}
    first, again = (read_batch(tokens, seed=3, step=7, **size)[0] for _ in range(2))
    assert first.shape == (4, 8)
    assert first.dtype == torch.int64
    assert torch.equal(first, again)
    assert not torch.equal(first, read_batch(tokens, seed=3, step=8, **size)[0])
    assert not torch.equal(first, read_batch(tokens, seed=4, step=7, **size)[0])


def test_inputs_are_consecutive_and_targets_one_further():
    inputs, targets = read_batch(_counting(1000), seed=0, step=0, batch_size=16, seq_len=8)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(8))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_rows_of_all_ranks_are_the_whole_batch(num_ranks):
    # 8 rows at step 5 of an epoch of 44 sequences: the next epoch begins within the batch.
    tokens, size = _counting(46 * 10), {"seed": 1, "step": 5, "batch_size": 8, "seq_len": 10}
    whole = read_batch(tokens, **size)
    shares = [World(rank, num_ranks, torch.device("cpu"), "ddp").share_of(8) for rank in range(num_ranks)]
    parts = [read_batch(tokens, rows=rows, **size) for rows in shares]
    assert num_sequences(tokens, 10) == 44
    for part in (0, 1):
        assert torch.equal(torch.cat([both[part] for both in parts]), whole[part])


def test_batches_do_not_depend_on_how_the_text_is_cut_into_shards():
    cut = Tokens(np.split(np.arange(1000), [1, 17, 400, 401, 990]))
    for step in range(20):
        whole, pieces = (read_batch(t, seed=0, step=step, batch_size=8, seq_len=16)[0] for t in (_counting(1000), cut))
        assert torch.equal(whole, pieces)


def test_epoch_takes_every_sequence_once_and_none_twice():
    tokens = _counting(105)
    count = num_sequences(tokens, 10)
    assert count == 9  # ten would fit; one is left as room to cut elsewhere
    starts = _starts(tokens, seq_len=10, steps=range(3), batch_size=3)
    assert sorted(starts) == [min(starts) + 10 * i for i in range(9)]
    assert starts != sorted(starts)


def test_epochs_follow_each_other_within_a_batch():
    tokens = _counting(105)
    starts = _starts(tokens, seq_len=10, steps=range(9), batch_size=4)  # 36 = 4 epochs of 9
    epochs = [starts[9 * i : 9 * i + 9] for i in range(4)]
    for epoch in epochs:
        assert sorted(epoch) == [min(epoch) + 10 * i for i in range(9)]
    assert len({min(epoch) for epoch in epochs}) > 1  # cut at other places
    assert len({tuple(start - min(epoch) for start in epoch) for epoch in epochs}) == 4  # in other orders


def test_all_of_the_text_is_read_in_the_end_to_its_last_token():
    inputs, targets = (torch.cat(part) for part in zip(*_many_epochs(_counting(50), seq_len=7), strict=True))
    assert set(inputs.flatten().tolist()) == set(range(49))
    assert set(targets.flatten().tolist()) == set(range(1, 50))


def _many_epochs(tokens, *, seq_len):
    return [read_batch(tokens, seed=0, step=step, batch_size=5, seq_len=seq_len) for step in range(100)]


@settings(max_examples=200)
@given(
    seq_len=st.integers(1, 40),
    more=st.integers(1, 300),
    batch_size=st.integers(1, 9),
    step=st.integers(0, 10**7),
    seed=st.integers(0, 2**40),
)
def test_batches_never_leave_the_text(seq_len, more, batch_size, step, seed):
    tokens = _counting(seq_len + more)
    inputs, targets = read_batch(tokens, seed=seed, step=step, batch_size=batch_size, seq_len=seq_len)
    assert inputs.shape == targets.shape == (batch_size, seq_len)
    assert inputs.min() >= 0
    assert targets.max() < len(tokens)
    assert torch.equal(targets, inputs + 1)


def test_text_of_one_sequence_and_its_target_is_enough_and_one_token_less_is_not():
    inputs, targets = read_batch(_counting(9), seed=0, step=3, batch_size=2, seq_len=8)
    assert inputs.tolist() == [list(range(8))] * 2
    assert targets[0, -1] == 8
    with pytest.raises(ValueError, match="8 tokens, fewer than one sequence of 8 and its target: pass a smaller --seq-len"):
        read_batch(_counting(8), seed=0, step=0, batch_size=1, seq_len=8)


# The order within an epoch


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 1000, 1024, 1025, 5000])
def test_shuffled_is_a_permutation(count):
    for seed in range(5):
        assert sorted(shuffled(np.arange(count), count, _keys(seed)).tolist()) == list(range(count))


@given(count=st.integers(1, 3000), seed=st.integers(0, 1000), data=st.data())
def test_shuffled_moves_each_position_whatever_the_others_are(count, seed, data):
    some = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=5))
    whole = shuffled(np.arange(count), count, _keys(seed))
    assert shuffled(np.array(some), count, _keys(seed)).tolist() == whole[some].tolist()


def test_shuffled_reaches_every_order_of_few_positions():
    orders = {tuple(shuffled(np.arange(4), 4, _keys(seed)).tolist()) for seed in range(1000)}
    assert len(orders) == 24


@pytest.mark.parametrize("count", [1000, 1024, 1025, 4096])
def test_order_of_an_epoch_looks_random(count):
    orders = np.stack([_order(count, seed) for seed in range(40)])
    positions = np.arange(count)
    # A random order moves a position by a third of the count, has one fixed point and rises every second time.
    assert np.abs(orders - positions).mean() == pytest.approx(count / 3, rel=0.02)
    assert (orders == positions).sum(1).mean() == pytest.approx(1, abs=0.6)
    assert (np.diff(orders) > 0).mean() == pytest.approx(0.5, abs=0.01)
    # No two seeds agree in more places than two random orders would, which is one.
    agreements = [(orders[i] == orders[j]).sum() for i in range(40) for j in range(i)]
    assert np.mean(agreements) == pytest.approx(1, abs=0.2)


def test_every_part_of_an_epoch_reads_from_every_part_of_the_text_equally():
    # Positions by eighths against places by eighths: chi-square with 49 degrees of freedom, so 49 +- 10 for each seed.
    count, parts = 4000, 8
    statistics = []
    for seed in range(40):
        order = _order(count, seed)
        table = np.zeros((parts, parts))
        np.add.at(table, (np.arange(count) * parts // count, order * parts // count), 1)
        expected = count / parts**2
        statistics.append(((table - expected) ** 2).sum() / expected)
    assert np.mean(statistics) == pytest.approx(49, abs=6)
    assert max(statistics) < 100


# The text of a run


def test_last_twentieth_is_validated_on_and_never_trained_on(tmp_path):
    text = open_text(_run(_folder(tmp_path / "text", np.arange(1000))))
    assert (len(text.train), len(text.valid)) == (950, 50)
    trained = {token for step in range(200) for token in _tokens_of(text.train, step)}
    validated = {token for step in range(200) for token in _tokens_of(text.valid, step)}
    assert max(trained) < 950 <= min(validated)
    assert len(validated) == 50


def _tokens_of(tokens, step):
    inputs, targets = read_batch(tokens, seed=0, step=step, batch_size=4, seq_len=8)
    return [*inputs.flatten().tolist(), *targets.flatten().tolist()]


def test_text_for_validation_leaves_all_of_the_data_to_train_on(tmp_path):
    train = _folder(tmp_path / "train", np.arange(500))
    valid = _folder(tmp_path / "valid", np.arange(500, 600))
    text = open_text(_run(train, valid_data=valid))
    assert (len(text.train), len(text.valid), text.info.num_tokens, text.info.largest_token) == (500, 100, 600, 599)
    assert text.info.name == f"{train}, validated on {valid}"
    assert text.info.sha256 != open_text(_run(train)).info.sha256


OTHER = TokenizerInfo("other", 1000, None, "b" * 64)
# What is wrong -> (lengths of the texts to train and to validate on, the tokenizer of the second, the vocabulary, the message)
UNFIT = {
    "vocabulary": (1000, None, TINY, 999, "token 999, beyond the model's vocabulary of 999: pass --vocab-size 1024"),
    "vocabulary of the text for validation": (500, 600, TINY, 512, "token 599, beyond the model's vocabulary of 512"),
    "two tokenizers": (100, 100, OTHER, 1024, r"different tokenizers \(tiny and other\): prepare both with the same one"),
    # 160 tokens are enough to train on, but their last twentieth is 8, and a sequence of 8 needs 9.
    "too little to validate on": (160, None, TINY, 1024, "the validation text has 8 tokens, fewer than one sequence of 8"),
    "too little to train on": (5, 100, TINY, 1024, "the training text has 5 tokens"),
}


@pytest.mark.parametrize(("length", "valid", "tokenizer", "vocab_size", "message"), UNFIT.values(), ids=UNFIT)
def test_texts_that_do_not_fit_are_refused(tmp_path, length, valid, tokenizer, vocab_size, message):
    train = _folder(tmp_path / "train", np.arange(length))
    valid_data = None if valid is None else _folder(tmp_path / "valid", np.arange(valid), tokenizer)
    with pytest.raises(ValueError, match=message):
        open_text(_run(train, valid_data=valid_data, vocab_size=vocab_size))


@pytest.mark.parametrize(("length", "vocab_size"), [(1000, 1000), (180, 1024)])
def test_texts_that_just_fit_are_taken(tmp_path, length, vocab_size):
    assert (
        open_text(_run(_folder(tmp_path / "text", np.arange(length)), vocab_size=vocab_size)).info.largest_token == length - 1
    )


def test_damaged_shard_is_found_before_training(tmp_path):
    folder = _folder(tmp_path / "text", np.arange(1000), shard_tokens=300)
    shard = tmp_path / "text" / "tokens-00002.bin"
    content = bytearray(shard.read_bytes())
    content[0] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=r"tokens-00002.bin has changed since it was prepared"):
        open_text(_run(folder))


def test_hashes_tell_texts_apart(tmp_path):
    changed = np.arange(1000)
    changed[500] = 0
    texts = [
        _folder(tmp_path / name, tokens) for name, tokens in (("a", np.arange(1000)), ("b", np.arange(1000)), ("c", changed))
    ]
    hashes = [open_text(_run(text)).info.sha256 for text in texts]
    assert hashes[0] == hashes[1] != hashes[2]


def test_standard_library_is_python_source_without_tests():
    text = open_text(RunConfig())
    assert text.info.num_tokens > 5_000_000
    assert text.info.largest_token < 256
    assert text.tokenizer is None
    beginning = bytes(text.train.windows(np.array([0]), 100_000)[0].astype(np.uint8))
    assert b"def " in beginning
    assert len(standard_library()) == text.info.num_tokens


@pytest.mark.parametrize(("needed", "padded"), [(1, 64), (64, 64), (65, 128), (256, 256), (50257, 50304)])
def test_vocabularies_are_padded_to_a_multiple_of_64(needed, padded):
    assert padded_vocab(needed) == padded
