"""One step of a run: the model on its device, its optimizers, and the function from a step's number to its loss."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smupar.check.audit.audit import audit
from smupar.execute.compiler_cache import guard_compiler_cache
from smupar.execute.cpu_products import fast_products
from smupar.execute.cuda_graphs import GraphedCall, Uploader, compile_static
from smupar.execute.sparse.convert import StorageReport, sparsify_storage
from smupar.lm.config.run_config import Execution, RunConfig
from smupar.lm.data.batches import Corpus, read_batch
from smupar.lm.data.tokens import Tokens
from smupar.lm.model.cost import fitting_micro_batch
from smupar.lm.model.gpt import use_flex_attention
from smupar.lm.run.companions import Companions
from smupar.lm.run.distributed import World, accumulate, build_on_device, reshard, wrap
from smupar.lm.run.optimizers import make_optimizers, set_lr
from smupar.lm.run.schedule import lr_share
from smupar.plan.facts.optimizers import facts_of
from smupar.refusals import refuse
from smupar.updates.trace import Trace


def next_token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of the next token, in nats, for a batch of inputs and targets."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


class Stepper:
    """``step(n)`` does step n of the run and returns its loss as a tensor on the device. The host does not read it, so it
    can queue the next step at once."""

    def __init__(self, config: RunConfig, how: Execution, world: World, corpus: Corpus, trace: Trace | None = None) -> None:
        """``trace`` is the trace to follow; by default it is read from the file ``config.follow``.

        The order matters. Weights get their storage first, then optimizers are built. The audit comes before the companions,
        because companions give each hidden weight its own group. They also add hooks and buffers, so DDP wraps the model
        afterwards. Then the model is compiled, and the whole step is captured.
        """
        self.config, self.configs, self.world, self.corpus = config, [config], world, corpus
        self.upload = Uploader(world.device)
        self.rows = world.share_of(config.batch_size)
        self.num_micro = _num_micro_batches(self.rows[1] - self.rows[0], how.micro_batch or _fitting(config, world))
        self.compiled = world.device.type == "cuda" if how.compile is None else how.compile
        self.model, self.plan = build_on_device(config, world)
        self.storage = self._keep_nonzeros(how)
        self._refuse_graph(how)
        self.optimizers = make_optimizers(self.model, self.plan, config, capturable=how.graph)
        audit(self.model, self.plan, self.optimizers)
        self.companions = Companions(self.model, self.plan, self.optimizers, config, trace=trace, observes=how.observe)
        self.forward = wrap(self.model, world)
        self.loss_fn = self._compile() if self.compiled else next_token_loss
        self._call: Callable[..., Tensor] = GraphedCall(self._passes) if how.graph else self._passes

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(row.shape) for row in self.plan)

    def _keep_nonzeros(self, how: Execution) -> StorageReport | None:
        if how.storage == "dense":
            return None
        facts = facts_of(self.config.optimizer)
        refuse(self.config.prunes, f"a run that is pruned starts dense: leave out --storage {how.storage}")
        refuse(facts.mixes_entries, f"{facts.name} needs whole matrices: leave out --storage {how.storage}")
        with fast_products():  # as in training, since auto compares with these products
            return sparsify_storage(
                self.model,
                self.plan,
                backend=how.storage,
                tokens=(self.rows[1] - self.rows[0]) // self.num_micro * self.config.seq_len,
                passes=self.num_micro,
                dtype=torch.bfloat16 if self.config.dtype == "bf16" else torch.float32,
                captured=how.graph,
            )

    def _refuse_graph(self, how: Execution) -> None:
        config, on_one_gpu = self.config, self.world.device.type == "cuda" and self.world.size == 1
        is_fixed = not (config.dynamic != "none" or config.follow or config.record or how.observe)
        can_be_captured = on_one_gpu and self.num_micro == 1 and facts_of(config.optimizer).capturable and is_fixed
        refuse(
            how.graph and not can_be_captured,
            "--graph needs one GPU, one micro-batch per step, Adam or AdamW, fixed masks, and no measurements: leave out "
            "--graph",
        )

    def _compile(self) -> Callable[..., Tensor]:
        """Compiles the model, and returns the function for the loss."""
        if self.world.device.type == "cuda" and self.config.model.positions == "alibi":
            use_flex_attention(self.model, self.config.seq_len)
        if not self.world.sharded:
            return compile_static(next_token_loss)
        guard_compiler_cache()
        for block in self.model.blocks:  # one at a time, so that FSDP2 can gather and free its weights around it
            block.compile(dynamic=False)
        return next_token_loss

    def _uncompiled_if_observed(self) -> contextlib.AbstractContextManager[object]:
        """If the step is observed, a context that runs it uncompiled, since compiled code skips hooks on gradients. Otherwise
        an empty context."""
        observer = self.companions.observer
        is_observed = observer is not None and observer.is_due
        return torch.compiler.set_stance("force_eager") if is_observed and self.compiled else contextlib.nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps beside model and optimizers, as plain values for JSON."""
        return self.companions.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.companions.load_state_dict(state)

    @property
    def sparsities(self) -> list[float]:
        return [self.companions.sparsity]

    def traces(self) -> list[Trace | None]:
        return [self.companions.trace]

    def step(self, step: int) -> Tensor:
        set_lr(self.optimizers, lr_share(step, self.config))
        with self._uncompiled_if_observed():
            return self._call(*self._batch(self.corpus.train, self.config.seed, step)).clone()

    def _passes(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Does the whole step: all micro-batches, the optimizers, and what follows them."""
        total = torch.zeros((), device=self.world.device)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        micro_batches = zip(inputs.chunk(self.num_micro), targets.chunk(self.num_micro), strict=True)
        for number, micro_batch in enumerate(micro_batches, start=1):
            with accumulate(self.forward, last=number == self.num_micro), self._precision():
                loss = self.loss_fn(self.forward, micro_batch) / self.num_micro
                loss.backward()
            total += loss.detach()
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self.companions.after_step()
        return total

    @torch.no_grad()
    def validate(self, *, until: Callable[[], bool] = lambda: False) -> list[float] | None:
        """The mean loss over the run's validation batches, the same ones each time; None if ``until`` stopped it."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for step in range(self.config.valid_batches):
            if self.world.any(until())[0]:
                reshard(self.model)
                return None
            inputs, targets = (part.chunk(self.num_micro) for part in self._batch(self.corpus.valid, 0, step))
            for micro_batch in zip(inputs, targets, strict=True):
                with self._precision():
                    total += self.loss_fn(self.forward, micro_batch)
        reshard(self.model)
        return [self.world.mean(total / (self.config.valid_batches * self.num_micro)).item()]

    def _batch(self, tokens: Tokens, seed: int, step: int) -> tuple[Tensor, Tensor]:
        return read_batch(
            tokens,
            seed=seed,
            step=step,
            batch_size=self.config.batch_size,
            seq_len=self.config.seq_len,
            rows=self.rows,
            to=self.upload,
        )

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        """How the layers multiply."""
        if self.config.dtype == "bf16" and not self.world.sharded:  # shards are gathered in bf16 already
            return torch.autocast(self.world.device.type, torch.bfloat16)
        on_cpu = self.world.device.type == "cpu" and not self.world.sharded and not self.compiled
        return fast_products() if on_cpu else contextlib.nullcontext()


def _fitting(config: RunConfig, world: World) -> int:
    if world.device.type != "cuda":  # the same on every CPU, so that resumed runs have the same bits
        return config.batch_size // world.size
    return fitting_micro_batch(
        config,
        num_ranks=world.size,
        sharded=world.sharded,
        memory=torch.cuda.get_device_properties(world.device).total_memory,
    )


def _num_micro_batches(num_rows: int, micro_batch: int) -> int:
    refuse(
        num_rows % micro_batch,
        f"the {num_rows} sequences of a rank are not a multiple of micro_batch {micro_batch}: choose a divisor",
    )
    return num_rows // micro_batch
