"""One run of the check over whole runs, which is trained to the end and observed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from smupar.check.audit.findings import Finding
from smupar.check.coordinates.depth import SAME_DEPTH, ComparedLayers
from smupar.check.coordinates.grid_run import GridRun, faults_and_plans
from smupar.check.coordinates.readings import DY, GRAD_X, Cell, Reading
from smupar.check.whole_run.report import RunReport
from smupar.plan.plan import Plan
from smupar.plan.roles.parameters import parent_path
from smupar.updates.observation import ALIGNMENT, DECAY, ENTROPY, LR, MOVED, Observation
from smupar.updates.observer import observe

_NO_SIZES = (ALIGNMENT, LR, DECAY, MOVED)


class LongRun(GridRun):
    """A run that is observed at some steps, and not measured at every step."""

    def train(self, batches: list[Any]) -> None:
        self.measured = self.layers(batches[0])
        observer = observe(self.model, self.plan, self.optimizers, steps=len(batches))
        self.observation = observer.observation
        make = self.training.sparsifier if self.plan.hidden_sparsity else None  # a dense model has no masks to move
        sparsifier = None if make is None else make(self.model, self.plan, self.optimizers)
        with observer:
            for step, batch in enumerate(batches, 1):
                self._note_erased_ratios(step)
                loss = self._loss(batch, step)
                if loss is None:
                    break
                loss.backward()
                self.update()
                if sparsifier is not None:
                    sparsifier.step()
        self.faults += [
            Finding("its layer is neither linear nor a convolution, or is not trained", "unmeasured", name)
            for name in self.observation.unmeasured
        ]

    def read(self) -> list[Reading]:
        return readings_of(self.observation, self.cell, self.plan, self.measured)

    @classmethod
    def report(cls, runs: Sequence[Self], readings: list[Reading]) -> RunReport:
        return RunReport(readings, *faults_and_plans(runs), {run.cell: run.observation for run in runs})


def readings_of(observed: Observation, cell: Cell, plan: Plan, layers: ComparedLayers = SAME_DEPTH) -> list[Reading]:
    """The sizes of an observation, as readings of the coordinate check. ``layers`` says which layers are compared."""
    return [
        Reading(
            **vars(cell), step=step, place=layers.place(parent_path(name)) or name, kind="layer", role="hidden",
            quantity=quantity, rms=value / _expected(quantity, parent_path(name), plan, layers), mean_abs=value,
        )
        for quantity, rows in observed.sizes.items()
        if quantity not in _NO_SIZES
        for name, values in rows.items()
        if quantity == ENTROPY or layers.is_measured(parent_path(name))
        for step, value in zip(observed.at, values, strict=True)
    ]  # fmt: skip


def _expected(quantity: str, path: str, plan: Plan, layers: ComparedLayers) -> float:
    """The factor that the plan alone puts on a size. The layer that ends a branch is observed before its output is divided, so
    the factor of the branch is in the gradients of the other layers inside the branch, but not in its own."""
    if quantity == GRAD_X:
        return plan.output_factor * (1.0 if path in dict(plan.branches) else layers.gradient(path))
    return layers.effect(path) if quantity == DY else 1.0
