"""The record of ``observe``: how large outputs, gradients, updates and weights of hidden layers are at some steps of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from os import PathLike
from pathlib import Path
from statistics import median

from smupar.output.files import write_atomic
from smupar.output.json_files import DamagedFileError, as_record, parse_object, read_text, sealed_json
from smupar.output.tables import aligned
from smupar.refusals import refuse

FORMAT = "smupar-observation/1"
OBSERVED_FILE = "observed.json"  # usual file name
# Quantities, see ``observer``. The last quantity is 1 at a look if the layer's mask has moved since the look before.
Y, GRAD_X, DY = "Y", "grad X", "dY"
WEIGHTS, TOP, ALIGNMENT, ENTROPY = "weights", "top singular value", "alignment", "attention entropy"
LR, DECAY, MOVED = "LR", "LR times decay", "moved"
_REMEDY = "record one with smupar.observe"
LATE = 0.8  # the late part of a run starts at this share of it
_LARGEST_KAPPA = 1e9  # the kappa of an update that is completely random
_SHOWN = 8  # number of looks in the printed table


def is_looked_at(step: int, last: int | None = None) -> bool:
    """Whether to look at a step, counted from 1. The steps to look at are the rounded powers of sqrt(2), the step after four
    fifths of the run, and the last step."""
    return step in (last, last and int(LATE * last)) or step == round(2 ** (round(2 * math.log2(step)) / 2))


@dataclass
class Observation:
    """How large outputs, gradients, updates and weights of hidden layers are over a run.

    at          the steps that were looked at, counted from 1
    sizes       quantity -> layer -> a number for each look, which is not finite if it could not be measured
    per_neuron  layer -> kept weights per neuron, as planned
    unmeasured  hidden weights that are not observed: their layers are neither linear nor convolutions, or are not trained
    """

    num_steps: int = 0
    at: list[int] = field(default_factory=list)
    sizes: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    per_neuron: dict[str, float] = field(default_factory=dict)
    unmeasured: list[str] = field(default_factory=list)

    def add(self, step: int, looks: Mapping[str, Mapping[str, float]]) -> None:
        """Adds the numbers of one look: quantity -> layer -> number."""
        self.at.append(step)
        for quantity in {**self.sizes, **looks}:
            rows, new = self.sizes.setdefault(quantity, {}), looks.get(quantity, {})
            for name in {**rows, **new}:
                missing = [math.nan] * (len(self.at) - 1)
                rows.setdefault(name, missing).append(new.get(name, math.nan))

    @property
    def unseen(self) -> dict[str, list[str]]:
        """Quantity -> layers for which it was never measured."""
        never = {
            quantity: [name for name, values in rows.items() if not any(map(math.isfinite, values))]
            for quantity, rows in self.sizes.items()
        }
        return {quantity: names for quantity, names in never.items() if names}

    def kappa(self) -> float:
        """The number n of kept weights per neuron at which the common part of an update is as large as the rest.

        The contributions of a neuron's weights have a common part, which adds up like n, and a rest, which adds up like
        sqrt(n). The square of the alignment is then (n + kappa) / (1 + kappa). The square is averaged over the steps of the
        run, and kappa is the median over layers.
        """
        rows = self.sizes.get(ALIGNMENT, {})
        kappas = [_kappa(self.per_neuron[name], self._mean_square(values)) for name, values in rows.items()]
        kappas = [kappa for kappa in kappas if math.isfinite(kappa)]
        refuse(not kappas, "no alignment was measured: observe a whole run of the proxy")
        return median(kappas)

    def _mean_square(self, values: Sequence[float]) -> float:
        """The mean square of a layer's numbers over all steps. Each look stands for the steps that are nearest to it."""
        ends = [self.at[0] - 0.5, *((a + b) / 2 for a, b in pairwise(self.at)), self.num_steps + 0.5]
        pairs = [(value**2, end - start) for value, (start, end) in zip(values, pairwise(ends), strict=True)]
        finite = [(square, share) for square, share in pairs if math.isfinite(square)]
        total = sum(share for _, share in finite)
        return sum(square * share for square, share in finite) / total if total > 0 else math.nan

    def __str__(self) -> str:
        """A table of geometric means over layers at some of the looks, and notes on what was not measured."""
        chosen = _spread(range(len(self.at)), _SHOWN)
        lines = [["step", *(str(self.at[index]) for index in chosen)]]
        for quantity, rows in self.sizes.items():
            means = [_geometric_mean(values[index] for values in rows.values()) for index in chosen]
            lines.append([quantity, *(f"{mean:.3g}" if math.isfinite(mean) else "-" for mean in means)])
        notes = [f"{quantity} was not seen in {', '.join(names[:3])}" for quantity, names in self.unseen.items()]
        notes += [f"not measured: {', '.join(self.unmeasured)}"] if self.unmeasured else []
        return "\n".join([aligned(lines), *notes])

    # Files

    def to_json(self) -> str:
        sizes = {
            quantity: {name: [value if math.isfinite(value) else None for value in values] for name, values in rows.items()}
            for quantity, rows in self.sizes.items()
        }
        return json.dumps({"format": FORMAT, **asdict(self), "sizes": sizes})

    @classmethod
    def from_json(cls, text: str, *, source: str = "this text") -> Observation:
        """Reads what ``to_json`` or ``save`` wrote. ``source`` names the text in errors."""
        values = parse_object(text, source=source, remedy=_REMEDY)
        stored = values.pop("format", None)
        if stored != FORMAT:
            raise DamagedFileError(f"{source} is not an observation in format {FORMAT!r} (it says {stored!r}): {_REMEDY}")
        record = as_record(_StoredObservation, values, source=source, remedy=_REMEDY)
        rows = [row for of_layers in record.sizes.values() for row in of_layers.values()]
        if any(len(row) != len(record.at) for row in rows) or sorted(set(record.at)) != list(record.at):
            raise DamagedFileError(
                f"{source} is damaged (steps must increase, and each layer needs a number for each): {_REMEDY}"
            )
        sizes = {
            quantity: {name: [math.nan if value is None else float(value) for value in row] for name, row in of_layers.items()}
            for quantity, of_layers in record.sizes.items()
        }
        return cls(**{**vars(record), "sizes": sizes})

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the observation with a checksum."""
        write_atomic(Path(path), sealed_json(json.loads(self.to_json()), indent=None))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Observation:
        return cls.from_json(read_text(Path(path), remedy=_REMEDY), source=str(path))


@dataclass
class _StoredObservation:
    """The content of an observation's file, where numbers that are not finite are null."""

    num_steps: int
    at: list[int]
    sizes: dict[str, dict[str, list[float | None]]]
    per_neuron: dict[str, float]
    unmeasured: list[str]


def _kappa(per_neuron: float, square: float) -> float:
    if math.isnan(square):
        return math.nan
    return min(_LARGEST_KAPPA, max(0.0, per_neuron - square) / (square - 1)) if square > 1 else _LARGEST_KAPPA


def _geometric_mean(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    logs = [math.log(value) for value in finite if value > 0]
    return math.exp(sum(logs) / len(logs)) if logs else 0.0 if finite else math.nan


def _spread(items: Sequence[int], most: int) -> list[int]:
    """Up to ``most`` of the items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]
