"""Training models of transformers with what people train them with: its Trainer, Accelerate, torch.compile, DDP. On the CPU."""

import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import smupar
from smupar.integrations import huggingface
from smupar.model.attached import mask_of
from smupar.updates.observation import Observation

VOCAB, STEPS = 32, 12
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
BLOCKS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt2(**changes):
    torch.manual_seed(0)
    config = {"vocab_size": VOCAB, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 4, **SPECIAL, **changes}
    return GPT2LMHeadModel(GPT2Config(**config))


def neox():
    torch.manual_seed(0)
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=VOCAB, max_position_embeddings=16, **BLOCKS, **SPECIAL))


def vit():
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(**BLOCKS, image_size=8, patch_size=4, num_labels=4))


def sequences(number=64):
    """Arithmetic progressions modulo the vocabulary."""
    start, stride = torch.randint(VOCAB, (2, number, 1), generator=torch.Generator().manual_seed(0))
    rows = (start + stride * torch.arange(12)) % VOCAB
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in rows]


def pictures(number=64):
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (number,), generator=rng)
    images = torch.randn(4, 3, 8, 8, generator=rng)[labels] + torch.randn(number, 3, 8, 8, generator=rng)
    return [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]


def arguments(out, **changes):
    settings = {
        "max_steps": STEPS,
        "save_steps": 6,
        "logging_steps": STEPS,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    tuned = {"per_device_train_batch_size": 8, "learning_rate": 2**-6, "weight_decay": 0.01}
    return TrainingArguments(str(out), **{**settings, **tuned, **changes})


SPARSIFIERS = {
    "RigL": (smupar.RigL, {"every": 2, "stop": 9, "restart_bias_correction": True}),
    "SET": (smupar.SET, {"every": 2, "stop": 9}),
    "GMP": (smupar.GMP, {"density": 0.25, "every": 2, "stop": 9}),
    "IMP": (smupar.IMP, {"density": 0.25, "rounds": 2, "every": 4}),
}


class Run:
    """As a user would write it."""

    def __init__(self, out, *, model=None, what=None, trace=None, dataset=None, **changes):
        self.model = gpt2() if model is None else model
        dense = what in ("GMP", "IMP")
        self.plan = huggingface.parameterize(self.model, base=16, density=1.0 if dense else 0.25)
        args = arguments(out, **changes)
        self.optimizer = huggingface.make_optimizer(self.model, self.plan, args)
        sparsifier, _, measured = (what or "").partition(" and ")  # such as "RigL and record"
        kind, settings = SPARSIFIERS.get(sparsifier, (None, {}))
        self.sparsifier = kind and kind(self.model, self.plan, self.optimizer, **settings)
        self.updates = None
        if "record" in (what, measured):
            self.updates = smupar.record_updates(self.model, self.plan, self.optimizer)
        if what == "follow":
            self.updates = smupar.follow_updates(self.model, self.plan, self.optimizer, trace=trace)
        self.observer = smupar.observe(self.model, self.plan, self.optimizer) if what == "observe" else None
        parts = {"sparsifier": self.sparsifier, "updates": self.updates, "observer": self.observer}
        callback = huggingface.SmuparCallback(self.plan, **parts)
        self.trainer = Trainer(
            model=self.model,
            args=args,
            train_dataset=dataset or sequences(),
            optimizers=(self.optimizer, None),
            callbacks=[callback],
        )

    def train(self, **how):
        self.trainer.train(**how)
        return self

    @property
    def state(self):
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    @property
    def density(self):
        masks = {row.name: mask_of(self.model, row.name) for row in self.plan if row.role == "hidden"}
        for name, mask in masks.items():
            assert not self.model.get_parameter(name)[~mask].any()
        return {round(mask.float().mean().item(), 3) for mask in masks.values()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# The Trainer


def test_optimizer_has_the_plans_rates_and_the_trainers_decay(tmp_path):
    model = gpt2()
    plan = huggingface.parameterize(model, base=16, density=0.25)
    args = arguments(tmp_path, adam_beta2=0.95, adam_epsilon=1e-7)
    optimizer = huggingface.make_optimizer(model, plan, args)
    assert type(optimizer) is torch.optim.AdamW
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    assert seen.keys() == set(names.values())
    for name, group in seen.items():
        factor = plan[name].lr_factor("adam")
        assert group["lr"] == 2**-6 * factor
        decays = "bias" not in name and "ln_" not in name
        assert group["weight_decay"] == (0.01 / factor if decays else 0)  # independent of the learning rate
        assert group["betas"] == (0.9, 0.95)
        assert group["eps"] == 1e-7


@pytest.mark.parametrize("what", [None, *SPARSIFIERS, "record", "follow", "RigL and record", "observe"])
def test_run_resumed_from_a_checkpoint_is_the_uninterrupted_one(what, tmp_path):
    trace = None
    if what == "follow":
        trace = tmp_path / "proxy.trace.json"
        Run(tmp_path / "proxy", what="record", save_strategy="no").train().updates.trace.save(trace)
    whole = Run(tmp_path / "whole", what=what, trace=trace).train()
    rest = Run(tmp_path / "rest", what=what, trace=trace).train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    assert same(whole.state, rest.state)
    assert whole.density == rest.density == {0.25}
    if whole.sparsifier is not None:
        assert whole.sparsifier.num_steps == rest.sparsifier.num_steps == STEPS
        moved = load_masks(tmp_path / "whole" / "checkpoint-6")
        assert any(not torch.equal(mask, whole.state[name]) for name, mask in moved.items())  # there was something to lose
    if whole.updates is not None:
        assert whole.updates.trace == rest.updates.trace
        assert whole.updates.trace.num_steps == STEPS
    if whole.observer is not None:
        seen = [Observation.load(tmp_path / name / "observed.json") for name in ("whole", "rest")]
        assert seen[0].at == seen[1].at == [1, 2, 3, 4, 6, 8, 11]
        assert seen[0].sizes["dY"] == seen[1].sizes["dY"]
    # A checkpoint, and what save_model writes, are models to load.
    again, plan = huggingface.load(tmp_path / "whole" / "checkpoint-12")
    assert same(again.state_dict(), whole.state)
    whole.trainer.save_model(tmp_path / "saved")
    assert same(huggingface.load(tmp_path / "saved")[0].state_dict(), whole.state)
    assert plan.diff(whole.plan) == []


def load_masks(folder):
    model, _ = huggingface.load(folder)
    return {name: tensor for name, tensor in model.state_dict().items() if name.endswith("_mask")}


@pytest.mark.parametrize(("build", "dataset"), [(neox, sequences), (vit, pictures)], ids=["gpt_neox", "vit"])
def test_models_whose_names_transformers_changes_on_disk_resume_too(build, dataset, tmp_path):
    whole = Run(tmp_path / "whole", model=build(), what="RigL", dataset=dataset()).train()
    rest = Run(tmp_path / "rest", model=build(), what="RigL", dataset=dataset())
    rest.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    assert same(whole.state, rest.state)


def test_accumulated_gradients_move_masks_as_one_batch_does(tmp_path):
    once = Run(tmp_path / "once", model=gpt2(**NO_DROPOUT), what="RigL", per_device_train_batch_size=16).train()
    in_two = Run(tmp_path / "two", model=gpt2(**NO_DROPOUT), what="RigL", gradient_accumulation_steps=2).train()
    assert in_two.sparsifier.num_steps == STEPS
    masks = [name for name in once.state if name.endswith("_mask")]
    assert masks
    for name in masks:
        assert (once.state[name] == in_two.state[name]).float().mean() > 0.99  # sums in another order


def test_training_lowers_the_loss_and_keeps_the_ratios(tmp_path):
    run = Run(
        tmp_path, what="RigL", max_steps=40, warmup_steps=4, lr_scheduler_type="cosine", logging_steps=1, save_strategy="no"
    )
    losses = [entry["loss"] for entry in run.train().trainer.state.log_history if "loss" in entry]
    assert len(losses) == 40
    assert losses[-1] < 0.9 * losses[0]


def test_noise_on_embeddings_is_no_fault(tmp_path):
    run = Run(tmp_path, max_steps=2, neftune_noise_alpha=5.0).train()  # a hook of the Trainer's, on the table the audit probes
    assert run.trainer.state.global_step == 2
    assert run.model.training


def test_trainers_own_optimizer_is_noticed(tmp_path):
    model = gpt2()
    plan = huggingface.parameterize(model, base=16, density=0.25)
    callback = huggingface.SmuparCallback(plan)
    trainer = Trainer(model=model, args=arguments(tmp_path), train_dataset=sequences(), callbacks=[callback])
    with pytest.raises(smupar.AuditError, match=r"learning rate is .* the plan says"):
        trainer.train()


def test_sparsifier_of_another_optimizer_is_noticed(tmp_path):
    run = Run(tmp_path, what="RigL")
    run.trainer.optimizer = huggingface.make_optimizer(run.model, run.plan, run.trainer.args)
    with pytest.raises(ValueError, match="have another optimizer than the Trainer"):
        run.train()


def test_checkpoint_without_a_sparsifier_says_so(tmp_path):
    Run(tmp_path / "static").train()
    run = Run(tmp_path / "moving", what="RigL")
    with pytest.warns(smupar.PlanWarning, match="holds no state of the sparsifier"):
        run.train(resume_from_checkpoint=str(tmp_path / "static" / "checkpoint-6"))
    assert run.sparsifier.num_steps == 6


def test_optimizer_without_a_rule_is_refused(tmp_path):
    model = gpt2()
    plan = huggingface.parameterize(model, base=16)
    with pytest.raises(ValueError, match="Adafactor scales its step"):
        huggingface.make_optimizer(model, plan, arguments(tmp_path, optim="adafactor"))


# Accelerate


def accelerated(folder, *, steps, resume=False):
    model = gpt2(**NO_DROPOUT)
    plan = huggingface.parameterize(model, base=16, density=0.25)
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=2**-6))
    rigl = smupar.RigL(model, plan, optimizer, every=2, stop=9)
    accelerator = Accelerator(cpu=True)
    wrapped, prepared = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(rigl)
    if resume:
        accelerator.load_state(folder)
    tokens = torch.stack([sequence["input_ids"] for sequence in sequences(16)])
    while rigl.num_steps < steps:
        accelerator.backward(wrapped(input_ids=tokens, labels=tokens).loss)
        accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
        prepared.step()
        prepared.zero_grad()
        rigl.step()
    smupar.audit(model, plan, optimizer)
    if not resume:
        accelerator.save_state(folder)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_accelerate_trains_and_goes_on_from_its_checkpoint(tmp_path):
    whole = accelerated(tmp_path / "whole", steps=8)
    accelerated(tmp_path / "half", steps=4)
    assert same(whole, accelerated(tmp_path / "half", steps=8, resume=True))


# torch.compile


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_compiled_model_trains_as_the_plain_one(backend, tmp_path):
    def run(name, **how):
        made = Run(tmp_path / name, model=gpt2(**NO_DROPOUT), what="RigL", logging_steps=1, save_strategy="no", **how).train()
        assert made.density == {0.25}
        return [entry["loss"] for entry in made.trainer.state.log_history if "loss" in entry]

    plain = run("plain")
    assert len(plain) == STEPS
    assert run("compiled", torch_compile=True, torch_compile_backend=backend) == pytest.approx(plain, rel=1e-3)


# Two processes


def on_a_rank(rank, folder):
    # What torchrun sets; the processes meet at a file, which needs no free port.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=smupar.PlanWarning)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    run = Run(Path(folder) / "two", model=gpt2(**NO_DROPOUT), what="RigL", per_device_train_batch_size=4, ddp_backend="gloo")
    run.train()
    assert isinstance(run.trainer.model_wrapped, DistributedDataParallel)
    assert run.density == {0.25}
    torch.save(run.state, Path(folder) / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow  # two more processes import transformers
def test_trainer_on_two_processes_agrees_with_one(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    mp.spawn(on_a_rank, (str(tmp_path),), nprocs=2)
    alone = Run(tmp_path / "one", model=gpt2(**NO_DROPOUT), what="RigL").train().state
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    assert same(first, second)
    assert same(huggingface.load(tmp_path / "two" / "checkpoint-12")[0].state_dict(), first)
    for name, tensor in alone.items():
        if name.endswith("_mask"):
            assert (tensor == first[name]).float().mean() > 0.99
        else:
            torch.testing.assert_close(first[name], tensor, rtol=0.05, atol=0.02)


def test_open_reminder_stops_the_trainer_until_it_is_settled(tmp_path):
    run = Run(tmp_path, save_strategy="no")
    run.plan.pending["multipliers"] = "embed_scale = 16 (base: 8)."
    with (
        pytest.warns(smupar.PlanWarning, match="not set yet: multipliers"),
        pytest.raises(
            ValueError, match=r"still asks for multipliers.*before trainer\.train\(\): plan\.settle\('multipliers'\)"
        ),
    ):
        run.train()
    run.plan.settle("multipliers")
    assert run.train().trainer.state.global_step == STEPS
