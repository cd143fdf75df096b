"""Runs that share shapes, trained as one stack."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from smupar.execute.stack.gather import SUPPORTED, Hyperparameters
from smupar.execute.stack.stack import Stack
from smupar.lm.config.run_config import RunConfig
from smupar.lm.data.batches import Corpus, read_batch
from smupar.lm.data.tokens import Tokens
from smupar.lm.model.gpt import GPT, AttentionKernel, build, ends_of_branches, use_attention
from smupar.lm.run import checkpoint
from smupar.lm.run.companions import StackCompanions
from smupar.lm.run.distributed import World
from smupar.lm.run.folder import Summary, write_corpus_info
from smupar.lm.run.schedule import lr_share
from smupar.lm.run.step import next_token_loss
from smupar.model.factors import add_missing_branch_factors
from smupar.output.files import write_atomic
from smupar.plan.plan import Plan, PlanWarning
from smupar.updates.trace import Trace

# Fields in which the runs of a stack may differ. ``build`` (model, plan, masks), ``hyperparameters``, ``lr_share``, ``_batch``
# and ``lm/run/companions`` read these from each run's own configuration. All other fields are in ``stack_key``.
STACKABLE_FIELDS: tuple[str, ...] = (
    *(
        "rule",
        "kappa",
        "depth_rule",
        "base_width",
        "sparsity",
        "pattern",
        "allocation",
        "init_std",
        "alpha_input",
        "alpha_output",
    ),
    *("dynamic", "mask_every", "mask_stop", "drop_fraction", "correction", "follow"),
    *("lr", "rest_lr", "eps", "eps_scaling", "weight_decay", "decay", "decayed", "clip", "schedule", "warmup", "seed"),
)

_FUSED_FROM = 256  # tokens of a sequence


def stack_key(config: RunConfig) -> str | None:
    """A key that is equal for runs that can be stacked together; None for a run that cannot be stacked."""
    if config.optimizer not in SUPPORTED:
        return None
    fixed = {name: value for name, value in asdict(config).items() if name not in STACKABLE_FIELDS}
    return json.dumps(
        {
            **fixed,
            "clips": config.clip is not None,
            "two optimizers": config.rest_lr is not None,
            "residual depth": config.residual_depth if config.model.residual_factor else None,
            "round": config.round_steps,
        }
    )


class GPTStack:
    """``step(n)`` does step n of every run and returns their losses. ``refill`` starts again with other runs of the same
    key."""

    def __init__(
        self,
        configs: Sequence[RunConfig],
        corpus: Corpus,
        device: torch.device,
        *,
        compile: bool | None = None,  # noqa: A002 (torch's word)
        own_batches: bool | None = None,
        attention: AttentionKernel | None = None,
    ) -> None:
        """``own_batches`` gives each run its own batches; it is the default if seeds differ. Refilling a stack does not change
        it."""
        self.corpus, self.device, self.world = corpus, device, World(0, 1, device, "ddp")
        first, on_gpu = configs[0], device.type == "cuda"
        models, plans = self._take(configs)
        for model in models:
            use_attention(model, attention or fastest_attention(first, device))
        self.own_batches = len(self.seeds) > 1 if own_batches is None else own_batches
        self.num_parameters = sum(parameter.numel() for parameter in models[0].parameters())
        self.stack = Stack(
            models,
            plans,
            next_token_loss,
            [hyperparameters(config) for config in configs],
            optimizer=first.optimizer,
            compile=on_gpu if compile is None else compile,
            dtype=torch.bfloat16 if first.dtype == "bf16" else None,
            own_batches=self.own_batches,
        )
        self.companions = StackCompanions(self.stack, plans, configs)

    def refill(self, configs: Sequence[RunConfig], built: Sequence[tuple[GPT, Plan]] | None = None) -> None:
        """``built`` is what ``build_all`` returns for these runs, if it has been called already."""
        models, plans = self._take(configs, built)
        assert self.own_batches or len(self.seeds) == 1, "runs of a stack with shared batches must have one seed"
        self.stack.refill(models, plans, [hyperparameters(config) for config in configs])
        self.companions = StackCompanions(self.stack, plans, configs)

    @property
    def num_steps(self) -> int:
        """Steps since the stack was filled."""
        return self.stack.num_steps

    @property
    def is_captured(self) -> bool:
        """Whether a step only replays a CUDA graph: everything that happens once is over."""
        return self.stack.is_captured

    @property
    def sparsities(self) -> list[float]:
        return self.companions.sparsities

    def traces(self) -> list[Trace | None]:
        return self.companions.traces()

    def _take(
        self, configs: Sequence[RunConfig], built: Sequence[tuple[GPT, Plan]] | None = None
    ) -> tuple[list[GPT], list[Plan]]:
        """The runs' models on the device, and their plans."""
        if built is None:
            with warnings.catch_warnings(action="ignore", category=PlanWarning):  # a study has already shown these warnings
                built = build_all(configs)
        self.configs = list(configs)
        self.seeds = sorted({config.seed for config in configs})
        return [model.to(self.device) for model, _ in built], [plan for _, plan in built]

    def state_dict(self) -> dict[str, Tensor]:
        """A copy, in the host's memory, of what training has changed."""
        parts = {"stack": self.stack.state_dict(), **self.companions.state_dict()}
        return {
            f"{part}.{name}": tensor.detach().to("cpu", copy=True)
            for part, own in parts.items()
            for name, tensor in own.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor], *, num_steps: int) -> None:
        """Continues after ``num_steps`` steps. The stack must have just been made or refilled with the same runs."""

        def part(name: str) -> dict[str, Tensor]:
            return {key.removeprefix(f"{name}."): tensor for key, tensor in state.items() if key.startswith(f"{name}.")}

        self.stack.load_state_dict(part("stack"), num_steps=num_steps)
        self.companions.load_state_dict({"updates": part("updates")})

    def save(self, folder: Path, summaries: Mapping[int, Summary]) -> None:
        """Writes the runs into folders named by their ids, for ``load_run``. ``summaries`` has the summaries by the runs'
        numbers."""
        self.stack.write_back()
        for number, summary in summaries.items():
            config, model = self.configs[number], self.stack.models[number]
            path = folder / config.id
            write_corpus_info(path, self.corpus)
            write_atomic(path / "config.json", config.to_json())
            checkpoint.save(
                path / "checkpoints",
                config.steps,
                model,
                optimizers=[],
                state={"run": config.id, "best_step": None, "valid_loss": summary.valid_loss, "seconds": summary.seconds},
                world=self.world,
            )

    def step(self, step: int) -> Tensor:
        batch, shares = self._batch(self.corpus.train, step), [lr_share(step, config) for config in self.configs]
        measured = self._batch(self.corpus.valid, step) if self.companions.measures_held_out else batch
        self.companions.before(step, batch, measured)
        losses = self.stack.step(batch, shares)
        self.companions.after(step, shares)
        return losses

    def validate(self, *, until: Callable[[], bool] = lambda: False) -> list[float] | None:
        """The mean loss of every run over the same validation batches; None if ``until`` stopped it."""
        first = self.configs[0]
        total = torch.zeros(len(self.configs), dtype=torch.float64, device=self.device)
        for step in range(first.valid_batches):
            if until():
                return None
            batch = self._of_seed(self.corpus.valid, 0, step)
            if self.own_batches:
                batch = (batch[0].expand(len(self.configs), -1, -1), batch[1].expand(len(self.configs), -1, -1))
            total += self.stack.evaluate(batch)
        return (total / first.valid_batches).tolist()

    def _batch(self, tokens: Tokens, step: int) -> tuple[Tensor, Tensor]:
        if not self.own_batches:
            return self._of_seed(tokens, self.seeds[0], step)
        by_seed = {seed: self._of_seed(tokens, seed, step) for seed in self.seeds}
        inputs, targets = zip(*(by_seed[config.seed] for config in self.configs), strict=True)
        return torch.stack(inputs), torch.stack(targets)

    def _of_seed(self, tokens: Tokens, seed: int, step: int) -> tuple[Tensor, Tensor]:
        first = self.configs[0]
        return read_batch(
            tokens, seed=seed, step=step, batch_size=first.batch_size, seq_len=first.seq_len, to=self.stack.upload
        )


def build_all(configs: Sequence[RunConfig]) -> list[tuple[GPT, Plan]]:
    """The models and plans of a stack's runs, in the host's memory."""
    # Drawing random numbers takes most of the time, and uses one thread for each model.
    with ThreadPoolExecutor(min(len(configs), os.cpu_count() or 1)) as pool:
        built = list(pool.map(build, configs))
    if configs[0].base_depth is not None:  # so that the stack can be refilled with runs of another depth rule
        for model, _ in built:
            add_missing_branch_factors(model, ends_of_branches(model))
    return built


def fastest_attention(config: RunConfig, device: torch.device) -> AttentionKernel:
    """How the attention of a stack is computed. On a GPU fused kernels want half precision, and short sequences do not need
    them (`smupar bench attention`)."""
    return "products" if device.type == "cuda" and (config.dtype != "bf16" or config.seq_len < _FUSED_FROM) else "fused"


def hyperparameters(config: RunConfig) -> Hyperparameters:
    names = ("lr", "rest_lr", "betas", "eps", "eps_scaling", "momentum", "weight_decay", "decay", "decayed", "clip")
    return Hyperparameters(**{name: getattr(config, name) for name in names})
