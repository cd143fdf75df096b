"""Folders to load models from: a run of five steps, and an export that is a known chain of tokens."""

import json
from dataclasses import asdict

import numpy as np
import torch
from safetensors.torch import save_file

from smupar.lm.config.run_config import Execution, ModelConfig, RunConfig
from smupar.lm.data.shard_writer import write_tokens
from smupar.lm.data.tokenizer import Tokenizer
from smupar.lm.model.gpt import GPT
from smupar.lm.run.train import train
from smupar.lm.use.load import EXPORT_FORMAT

BYTES = Tokenizer("bytes").info


def trained_run(folder, text):
    """A run on this text, whose vocabulary of 320 is padded: bytes need 256."""
    write_tokens(folder / "text", np.frombuffer(text, dtype=np.uint8), BYTES)
    size = {"base_width": 32, "steps": 5, "batch_size": 4, "seq_len": 16, "valid_batches": 1}
    model = ModelConfig(width=64, depth=1, vocab_size=320)
    config = RunConfig(model=model, sparsity=0.75, data=str(folder / "text"), **size)
    train(config, Execution(out=str(folder / "run"), device="cpu", peak_tflops=1.0))
    return str(folder / "run")


def chain(folder, following, **options):
    """An export whose likeliest next byte is ``following[byte]``, whatever came before: blocks that add nothing, one-hot
    embeddings, and an unembedding that is the table of the chain."""
    config = ModelConfig(width=256, depth=1, tied=False, **options)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.norm.weight.fill_(1)
        model.embedding.weight.copy_(torch.eye(256))
        for byte, after in following.items():
            model.unembedding.weight[after, byte] = 1
    folder.mkdir()
    save_file(dict(model.named_parameters()), folder / "model.safetensors")
    described = {"format": EXPORT_FORMAT, "storage": "dense", "model": asdict(config), "tokenizer": asdict(BYTES)}
    (folder / "config.json").write_text(json.dumps(described))
    return str(folder)
