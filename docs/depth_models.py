"""Checks over depth for GPT-2, Llama and a ResNet, whose rows are in docs/lab/depth-models.json.

``python docs/depth_models.py`` runs all of them, which takes an hour of one core. ``--only GPT-2 --depth-rule none`` runs one,
and ``--depths 2 4 8 --width 128 --seeds 2`` a smaller one. Each check adds its rows to the file as it ends, and a check whose
rows are there is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))  # for the batches, which live beside the tests

import smupar  # noqa: E402
from smupar.integrations import huggingface  # noqa: E402
from tests.support.architectures.architecture import HEAD_DIM, LENGTH, NUM_CLASSES, VOCAB, labels, noise, tokens  # noqa: E402

ROWS = DOCS / "lab" / "depth-models.json"
COLUMNS = ("rule", "depth_rule", "density", "place", "quantity", "step", "slope", "ci", "verdict")
RULES = (("smupar", "completep"), ("smupar", "none"), ("mup", "none"), ("smupar", "depth-mup"))


def gpt2(width: int, depth: int) -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": width, "n_layer": depth, "n_head": width // HEAD_DIM, "n_positions": 16}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCAB, **sizes, **dropout))


def llama(width: int, depth: int) -> nn.Module:
    heads = {"num_attention_heads": width // HEAD_DIM, "num_key_value_heads": width // HEAD_DIM}
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": depth, **heads}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=VOCAB, max_position_embeddings=16, **sizes))


class Block(nn.Module):
    """Norms and activations before convolutions, as in He et al., arXiv 1603.05027."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        return x + self.conv2(F.relu(self.norm2(y)))


class ResNet(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.BatchNorm2d(width), nn.Linear(width, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.blocks(self.stem(x)))).mean((2, 3)))


def _lm_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch).loss


def _set_scale(model: nn.Module, plan: Any) -> None:
    huggingface.set_attention_scale(model, plan, {"input_ids": tokens(0, length=LENGTH)})


def _images(seed: int) -> tuple[Tensor, Tensor]:
    return noise(seed, 16, 3, 4, 4), labels(seed, 16)


HF = {"prepare": _set_scale, "multipliers": "base"}
# name -> (model, loss, batches by seed, settings of the check)
MODELS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "GPT-2": (gpt2, _lm_loss, partial(tokens, length=LENGTH), HF),
    "GPT-2, larger embeddings": (gpt2, _lm_loss, partial(tokens, length=LENGTH), {**HF, "alpha_input": 9.17}),
    "Llama": (llama, _lm_loss, partial(tokens, length=LENGTH), HF),
    "ResNet": (ResNet, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), _images, {}),
}


def check(
    name: str,
    rule: str,
    depth_rule: str,
    width: int,
    depths: list[int],
    densities: list[float],
    seeds: int,
    rate: float = 2**-9,
) -> Any:
    make, loss, batch, settings = MODELS[name]
    example = (batch(0)[0],) if name == "ResNet" else {"input_ids": batch(0)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return smupar.coord_check(
            make, loss, [batch(seed) for seed in range(5)], base_width=64, widths=[width], depths=depths, densities=densities,
            rules=rule, depth=depth_rule, lr=rate, steps=5, seeds=seeds, example=example, progress=False, **settings,
        )  # fmt: skip


def rows_of(report: Any, rule: str, depth_rule: str) -> list[list[Any]]:
    slopes = [slope for slope in report.slopes if slope.axis == "depth" and slope.verdict]
    return [
        [rule, depth_rule, float(slope.where.partition("density ")[2]), slope.place, slope.quantity, slope.step,
         round(slope.slope, 4), round(slope.ci, 4), slope.verdict]
        for slope in slopes
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--depth-rule", nargs="+", default=["completep", "none", "depth-mup"])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--densities", type=float, nargs="+", default=[1, 1 / 16])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--rows", type=Path, default=ROWS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    hf.utils.logging.set_verbosity_error()
    size = {"width": asked.width, "depths": asked.depths, "densities": asked.densities, "seeds": asked.seeds}
    for rule, depth_rule in RULES:
        for name in asked.only:
            known = json.loads(asked.rows.read_text()) if asked.rows.exists() else {"columns": COLUMNS, "checks": []}
            about = {"model": name, "rule": rule, "depth_rule": depth_rule, **size}
            if depth_rule not in asked.depth_rule or any(about.items() <= each.items() for each in known["checks"]):
                continue
            start = time.process_time()
            report = check(name, rule, depth_rule, **size)
            print(f"{name}, {rule}, {depth_rule}, {time.process_time() - start:.0f} s of CPU\n{report.explain()}", flush=True)
            verdict = report.verdicts[rule]
            known["checks"].append({**about, "verdict": verdict, "rows": rows_of(report, rule, depth_rule)})
            asked.rows.write_text(json.dumps(known).replace('["smupar"', '\n["smupar"').replace('["mup"', '\n["mup"') + "\n")


if __name__ == "__main__":
    main()
