"""Runs of small models whose outcome is known, for predicting from the first tenth of a run whether a learning rate transfers.

``python docs/prediction.py run`` trains the runs that docs/lab/prediction.json.gz lacks. ``python docs/prediction.py fit``
prints how often each predictor is right on the half on which its numbers were chosen, and ``judge`` on the half that was held
out. Which settings are held out follows from their names, and was fixed before any of them was run.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))  # for the model and its data, which live beside the tests

import smupar  # noqa: E402
from tests.check.whole_run import test_causes as lab  # noqa: E402

ROWS = DOCS / "lab" / "prediction.json.gz"
STEPS, WIDTH, BASE, RATES = 400, 64, 32, tuple(range(-8, -2))  # log2 of the learning rates
EARLY, WINDOW = STEPS // 10, 10  # losses are kept as means of so many steps
QUANTITIES = ("Y", "dY", "weights", "alignment", "LR times decay")
NEAR = 0.01  # a learning rate transfers if its loss is at most this share above that of the best one


@dataclass(frozen=True)
class Setting:
    """How a target is trained. Its proxy has the same decay and depth, and is dense."""

    density: float
    decay: float
    coupled: bool = False
    moves: str = ""
    depth: int = 3
    width: int = WIDTH

    @property
    def name(self) -> str:
        parts = [f"density 1/{1 / self.density:g}", f"decay {self.decay:g}", "coupled" * self.coupled, self.moves]
        sizes = [f"depth {self.depth}" * (self.depth != 3), f"width {self.width}" * (self.width != WIDTH)]
        return ", ".join(filter(None, parts + sizes))

    @property
    def proxy(self) -> Setting:
        return Setting(1.0, self.decay, depth=self.depth)

    @property
    def is_held_out(self) -> bool:
        return self in sorted(SETTINGS, key=lambda each: hashlib.sha256(each.name.encode()).hexdigest())[: len(SETTINGS) // 2]


SETTINGS = (
    *(Setting(density, decay) for density in (1 / 4, 1 / 8, 1 / 16) for decay in (0.0, 0.1, 0.4)),
    *(Setting(density, decay, coupled=True) for density in (1 / 8, 1 / 16) for decay in (0.1, 0.4)),
    *(Setting(1 / 8, decay, moves=moves) for moves in ("RigL", "GMP") for decay in (0.0, 0.2)),
    *(Setting(1 / 16, 0.2, moves=moves) for moves in ("RigL", "GMP")),
    *(Setting(density, decay, depth=8) for density in (1 / 4, 1 / 8) for decay in (0.0, 0.2)),
    *(Setting(density, decay, width=128) for density in (1 / 8, 1 / 32) for decay in (0.0, 0.2)),
    Setting(1 / 32, 0.2),
)


def sparsifier(setting: Setting, model: Any, plan: Any, optimizer: Any) -> Any:
    if setting.moves == "RigL":
        return smupar.RigL(model, plan, optimizer, every=20, stop=3 * STEPS // 4)
    return smupar.GMP(model, plan, optimizer, every=20, stop=3 * STEPS // 4, density=setting.density)


class Model(lab.Residual):  # type: ignore[misc]
    """The model of the tests of late faults, at any depth."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width)
        self.blocks = torch.nn.ModuleList(lab.Block(width) for _ in range(depth))


def train(setting: Setting, rate: int) -> dict[str, Any]:
    """A run: its losses, the one at the end, and what was observed."""
    torch.manual_seed(0)
    model = Model(setting.width, setting.depth)
    start = 1.0 if setting.moves == "GMP" else setting.density
    plan = smupar.parameterize(model, base=Model(BASE, setting.depth), density=start, seed=0)
    groups = smupar.param_groups(
        model, plan, lr=2.0**rate, weight_decay=setting.decay, decay="coupled" if setting.coupled else "independent"
    )
    optimizer = torch.optim.AdamW(groups)
    moving = sparsifier(setting, model, plan, optimizer) if setting.moves else None
    schedule = lab.falling(optimizer)
    losses: list[float] = []
    with smupar.observe(model, plan, optimizer, steps=STEPS) as seen:
        for tokens, targets in lab.batches():
            loss = F.cross_entropy(model(tokens), targets)
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                break
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if moving is not None:
                moving.step()
    sizes = {
        quantity: {name: [float(f"{value:.4g}") if math.isfinite(value) else None for value in row] for name, row in of.items()}
        for quantity, of in seen.sizes.items()
        if quantity in QUANTITIES
    }
    windows = [losses[start : start + WINDOW] for start in range(0, len(losses), WINDOW)]
    return {"losses": [round(fmean(window), 5) for window in windows], "at": seen.at, "sizes": sizes}


def known() -> dict[str, dict[str, Any]]:
    return json.loads(gzip.decompress(ROWS.read_bytes())) if ROWS.exists() else {}


def run() -> None:
    torch.set_num_threads(1)
    rows = known()
    asked = dict.fromkeys(each for setting in SETTINGS for each in (setting.proxy, setting))
    for setting in asked:
        for rate in RATES:
            if str(rate) not in rows.setdefault(setting.name, {}):
                rows[setting.name][str(rate)] = train(setting, rate)
        ROWS.write_bytes(gzip.compress(json.dumps(rows).encode(), mtime=0))
        print(setting.name, [round(final(rows[setting.name][str(rate)]), 3) for rate in RATES], flush=True)


def final(row: dict[str, Any]) -> float:
    """The loss of a run: the mean over its last twentieth."""
    last = row["losses"][-2:]
    return fmean(last) if len(row["losses"]) == STEPS // WINDOW and all(map(math.isfinite, last)) else math.inf


# Predicting. Numbers below were chosen on the half that is not held out.

_LOOK, _LIMIT, _COUPLED = 32, 1.165, 5.6  # the last look within a tenth; of the prediction; decays this many times as fast
_TEN_LIMIT, _LOSS_LIMIT = 1.65, 1.0205


@dataclass(frozen=True)
class Pair:
    """A target and its proxy, both at the learning rate that is best for the proxy."""

    target: dict[str, Any]
    proxy: dict[str, Any]
    cost: float  # of the proxy's learning rate for the target, as a share of the loss

    @property
    def transfers(self) -> bool:
        return self.cost <= NEAR

    def ratio(self, quantity: str, step: int) -> float:
        """log2 of target over proxy, as a mean over layers."""
        logs = [
            [math.log2(values[row["at"].index(step)]) for values in row["sizes"][quantity].values()]
            for row in (self.target, self.proxy)
        ]
        return sum(logs[0]) / len(logs[0]) - sum(logs[1]) / len(logs[1])

    def decay(self, row: dict[str, Any]) -> float:
        """The largest share of a weight that decay took in one step, in the first tenth."""
        looks = [index for index, step in enumerate(row["at"]) if step <= EARLY]
        return max(values[index] for values in row["sizes"]["LR times decay"].values() for index in looks)

    @property
    def predicted(self) -> bool:
        """Whether the learning rate will transfer. It will not if updates, relative to the layer's output, are much larger than
        the proxy's and decay does not make the weights forget them, or if decay is much faster than the proxy's."""
        forgotten = self.decay(self.proxy) * STEPS / 2  # a learning rate that falls to zero
        danger = (self.ratio("dY", _LOOK) - self.ratio("Y", _LOOK)) * math.exp(-forgotten)
        return danger < _LIMIT and self.decay(self.target) <= _COUPLED * max(self.decay(self.proxy), 1e-30)

    @property
    def by_ten_steps(self) -> bool:
        """The ten-step check: how much more updates do at step 8."""
        return abs(self.ratio("dY", 8)) < _TEN_LIMIT

    @property
    def by_loss(self) -> bool:
        """The loss so far, compared with the proxy's."""
        target, proxy = (row["losses"][EARLY // WINDOW - 1] for row in (self.target, self.proxy))
        return target / proxy < _LOSS_LIMIT


def pair_of(setting: Setting, rows: dict[str, dict[str, Any]]) -> Pair:
    losses, of_proxy = ({rate: final(rows[each.name][str(rate)]) for rate in RATES} for each in (setting, setting.proxy))
    best = min(of_proxy, key=lambda rate: of_proxy[rate])
    target, proxy = rows[setting.name][str(best)], rows[setting.proxy.name][str(best)]
    return Pair(target, proxy, losses[best] / min(losses.values()) - 1)


def judge(*, held_out: bool) -> None:
    rows = known()
    chosen = [setting for setting in SETTINGS if setting.is_held_out == held_out]
    pairs = {setting.name: pair_of(setting, rows) for setting in chosen}
    for name, pair in pairs.items():
        answers = [pair.predicted, pair.by_ten_steps, pair.by_loss]
        words = ["right" if answer == pair.transfers else "WRONG" for answer in answers]
        print(f"| {name} | {pair.cost:.2%} | {' | '.join(words)} |")
    for what, predicts in (("first tenth", "predicted"), ("ten steps", "by_ten_steps"), ("loss so far", "by_loss")):
        num = sum(getattr(pair, predicts) == pair.transfers for pair in pairs.values())
        print(f"{what}: {num} of {len(pairs)} right")


if __name__ == "__main__":
    {"run": run, "fit": lambda: judge(held_out=False), "judge": lambda: judge(held_out=True)}[sys.argv[1]]()
