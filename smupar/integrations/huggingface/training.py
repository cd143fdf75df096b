"""An optimizer made from ``TrainingArguments``, and a callback. With these, ``transformers.Trainer`` works unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from smupar.dynamic.sparsifiers import Sparsifier
from smupar.integrations.start_check import check_start
from smupar.integrations.state import carry_state
from smupar.model.seam import unwrap_optimizer
from smupar.optim.groups import param_groups
from smupar.plan.plan import Plan
from smupar.refusals import refuse
from smupar.updates.meter import Follower, Recorder
from smupar.updates.observation import OBSERVED_FILE
from smupar.updates.observer import Observer


def make_optimizer(model: PreTrainedModel, plan: Plan, args: TrainingArguments, **settings: Any) -> torch.optim.Optimizer:
    """The optimizer that ``args`` name, with the plan's groups. ``args.learning_rate`` is the base learning rate.

    As in the Trainer itself, norms and biases do not decay. ``settings`` are those of ``smupar.param_groups``.
    """
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
    refuse(
        not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or "params" in options or "model" in options,
        f"optim={str(args.optim)!r} builds its own groups instead of the plan's: choose adamw_torch, sgd or "
        "another plain optimizer",
    )
    # The method does not use self.
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    settings = {"no_decay": lambda name, _: name not in decayed, "optimizer": kind, **settings}
    groups = param_groups(model, plan, lr=options.pop("lr"), weight_decay=args.weight_decay, **settings)
    return kind(groups, **options)


class SmuparCallback(TrainerCallback):
    """Audits model and optimizer before the first step, and refuses to train while something that the plan asks you to set is
    not settled. Moves masks after each step, and keeps the state of sparsifiers, traces and observers in the Trainer's
    checkpoints.

    sparsifier   smupar.RigL(model, plan, optimizer, ...), SET, GMP or IMP
    updates      the result of smupar.record_updates or smupar.follow_updates
    observer     the result of smupar.observe; at the end the observation is written to observed.json in the output folder
    """

    def __init__(
        self,
        plan: Plan,
        *,
        sparsifier: Sparsifier | None = None,
        updates: Recorder | Follower | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.plan, self.sparsifier, self.updates, self.observer = plan, sparsifier, updates, observer
        for name, part in (("sparsifier", sparsifier), ("measured updates", updates), ("observation", observer)):
            if part is not None:
                carry_state(part.optimizers[0], {name: part})

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], unwrap_optimizer(kwargs["optimizer"])
        for part in (self.sparsifier, self.updates, self.observer):
            refuse(
                part is not None and optimizer not in part.optimizers,
                "the sparsifier, the measured updates or the observer have another optimizer than the Trainer: make one with "
                "make_optimizer, and pass it to them and to Trainer(optimizers=(optimizer, None))",
            )
        check_start(model, self.plan, optimizer, trained=state.global_step > 0, where="before trainer.train()")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.observer is not None and state.is_world_process_zero:
            self.observer.observation.save(Path(str(args.output_dir)) / OBSERVED_FILE)

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.sparsifier is None:
            return
        if self.sparsifier.has_stepped():
            self.sparsifier.step()
        else:  # fp16 overflowed, so there was no step
            self.sparsifier.load_state_dict(self.sparsifier.state_dict())  # the sparsifier forgets the gradients of this step
