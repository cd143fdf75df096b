"""A callback for Lightning that makes a LightningModule follow a rule, from ``setup`` to the last step.

    callback = SmuparCallback(base=lambda: Net(width=64), density=1 / 4, sparsifier=partial(smupar.RigL, every=100, stop=750))
    lightning.Trainer(callbacks=[callback]).fit(Net(width=256))

``configure_optimizers`` needs no change if it returns an optimizer over ``self.parameters()`` and no scheduler: the callback
makes the groups. A scheduler must be built on the groups. So if you have one, write
``torch.optim.AdamW(self.smupar.param_groups(lr=...))``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("smupar's Lightning callback needs lightning: pip install 'smupar[lightning]'") from error

from smupar.dynamic.sparsifiers import Sparsifier
from smupar.integrations.start_check import check_start
from smupar.integrations.state import carry_state
from smupar.model.attached import is_parameterized, mask_of
from smupar.model.parameterize import add_masks, attach, parameterize
from smupar.optim.groups import param_groups
from smupar.plan.plan import Plan
from smupar.plan.settings import Settings
from smupar.refusals import refuse
from smupar.updates.meter import Follower, Recorder
from smupar.updates.observation import OBSERVED_FILE
from smupar.updates.observer import Observer
from smupar.updates.observer import observe as _observe


class SmuparCallback(Callback):
    """Parameterizes the module, makes its parameter groups, runs the audit before the first step, and refuses to train while a
    reminder of the plan is open. After each step it moves masks and measures updates.

    base        the module at base width, or a function that builds it (on the meta device)
    plan        plan of a module that is already parameterized, instead of ``base`` and settings
    sparsifier  (module, plan, optimizers) -> RigL, SET, GMP or IMP, such as functools.partial(smupar.RigL, every=100, stop=750)
    updates     (module, plan, optimizers) -> result of smupar.record_updates or follow_updates
    prepare     function (module, plan) that sets what only you can set, such as the attention scale
    observe     measure hidden layers over the run: ``observer.observation``, and observed.json in the Trainer's folder
    settings    settings of ``smupar.parameterize``

    The module finds this callback as ``self.smupar``, with ``plan`` and ``param_groups``. Lightning's checkpoints hold the
    masks. The state of sparsifiers and traces is saved with the state of the optimizers.
    """

    def __init__(
        self,
        *,
        base: nn.Module | Callable[[], nn.Module] | None = None,
        plan: Plan | None = None,
        sparsifier: Callable[[nn.Module, Plan, Any], Sparsifier] | None = None,
        updates: Callable[[nn.Module, Plan, Any], Recorder | Follower] | None = None,
        prepare: Callable[[nn.Module, Plan], None] | None = None,
        observe: bool = False,
        **settings: Unpack[Settings],
    ) -> None:
        refuse(
            (base is None) == (plan is None) or (plan is not None and settings),
            "give either base, with settings as for smupar.parameterize, or the plan of a parameterized module",
        )
        self._base, self._plan, self._settings, self._prepare = base, plan, settings, prepare
        self._make: dict[str, Callable[[nn.Module, Plan, Any], Any] | None] = {
            "sparsifier": sparsifier,
            "measured updates": updates,
            "observation": _observe if observe else None,
        }
        self._module: LightningModule | None = None
        self._watched: list[torch.optim.Optimizer] = []
        self.sparsifier: Sparsifier | None = None
        self.updates: Recorder | Follower | None = None
        self.observer: Observer | None = None

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            raise ValueError("there is no plan before Trainer.fit has called setup")
        return self._plan

    def param_groups(self, *, lr: float, **settings: Any) -> list[dict[str, Any]]:
        """``smupar.param_groups`` of the module, for its ``configure_optimizers``."""
        assert self._module is not None, "called by the module's configure_optimizers, after setup"
        return param_groups(self._module, self.plan, lr=lr, **settings)

    def watch(self, optimizer: Any) -> None:
        """Makes the sparsifier and the measured updates. Usually the callback calls it. GMP, IMP and measured updates give
        hidden weights their own groups; with these, call it in ``configure_optimizers`` before you make a scheduler."""
        assert self._module is not None, "called by the module's configure_optimizers, after setup"
        self._watched = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        for left in filter(None, (self.updates, self.observer)):  # from an earlier fit
            left.remove()
        parts = {name: make and make(self._module, self.plan, self._watched) for name, make in self._make.items()}
        self.sparsifier, self.updates, self.observer = parts.values()
        carry_state(self._watched[0], parts)
        if self.sparsifier is not None:
            move = self.sparsifier.step
            self._watched[-1].register_step_post_hook(lambda *_: move())

    # Hooks that Lightning calls

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        refuse(
            not list(pl_module.parameters()),
            "the module has no parameters yet: build its layers in __init__, not in configure_model",
        )
        if not is_parameterized(pl_module):
            refuse(
                self._base is None,
                "a plan was given, but the module is not parameterized: give base and settings instead",
            )
            self._plan = parameterize(pl_module, base=self._base_model(), **self._settings)
        attach(pl_module, self.plan)
        if self._prepare is not None:
            self._prepare(pl_module, self.plan)
        if self._module is not pl_module:
            pl_module.register_load_state_dict_pre_hook(self._make_room)
        self._module = pl_module
        setattr(pl_module, "smupar", self)  # noqa: B010  # the class does not declare this attribute

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            if not any("lr_factor" in group for group in optimizer.param_groups):
                self._regroup(pl_module, optimizer, scheduled=bool(trainer.lr_scheduler_configs))
        if self._watched != trainer.optimizers:  # unless configure_optimizers has called watch
            self.watch(trainer.optimizers)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        where = "in prepare=, a function (module, plan) for this callback"
        check_start(pl_module, self.plan, trainer.optimizers, trained=trainer.global_step > 0, where=where)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.observer is not None and trainer.is_global_zero:
            self.observer.observation.save(Path(trainer.log_dir or trainer.default_root_dir) / OBSERVED_FILE)

    def _base_model(self) -> nn.Module:
        if isinstance(self._base, nn.Module):
            return self._base
        assert self._base is not None
        with torch.device("meta"):
            return self._base()

    def _regroup(self, module: nn.Module, optimizer: torch.optim.Optimizer, *, scheduled: bool) -> None:
        trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        # If configure_optimizers returns None, Lightning uses an optimizer without groups.
        refuse(not optimizer.param_groups, "the module has no optimizer to train with: return one from configure_optimizers")
        (group, *others) = optimizer.param_groups
        if others or scheduled or {id(parameter) for parameter in group["params"]} != trained:
            kind = type(optimizer).__name__
            raise ValueError(
                "groups can be made here only for one optimizer over self.parameters() without a scheduler: in "
                f"configure_optimizers write {kind}(self.smupar.param_groups(lr=..., optimizer={kind.lower()!r})) instead"
            )
        groups = param_groups(
            module, self.plan, lr=group["lr"], weight_decay=group.get("weight_decay", 0.0), optimizer=type(optimizer)
        )
        options = {key: value for key, value in group.items() if key not in ("params", "param_names", "lr", "weight_decay")}
        optimizer.param_groups[:] = [{**options, **planned} for planned in groups]

    def _make_room(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Adds masks before the checkpoint of a pruned model is loaded, since its sparsifier adds them only later."""
        hidden = [row.name for row in self.plan if row.role == "hidden" and f"{prefix}{row.name}_mask" in state]
        if any(mask_of(module, name) is None for name in hidden):
            add_masks(module, self.plan)
