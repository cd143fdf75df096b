"""The configurations of prepare, check, generate, export and eval, as frozen dataclasses. Runs have theirs in
``run_config``, and studies in ``smupar.study.config``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from smupar.lm.config.run_config import RunConfig
from smupar.lm.config.validation import (
    check_choices,
    check_not_negative,
    check_not_too_large,
    check_pattern_fits,
    check_positive,
    check_sparsities,
)
from smupar.refusals import refuse


@dataclass(frozen=True)
class PrepareConfig:
    """How text becomes token shards. If interrupted, run the same command to resume."""

    sources: tuple[str, ...]
    """Files or folders of text, JSONL (.jsonl, .json, also .gz) or Parquet; hf:NAME[:CONFIG], which streams a Hugging Face
    dataset; or slimpajama."""
    out: str = "data/text"
    """Folder for the shards and index.json."""
    tokenizer: str = "bytes"
    """bytes, gpt2, a `tokenizers` JSON file, or a folder with GPT-2 style vocabulary and merges."""
    field: str = "text"
    """Field or column that holds the text, in JSONL, Parquet and datasets."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    encoding: str = "utf-8"
    """Encoding of the files."""
    errors: Literal["strict", "replace", "ignore"] = "strict"
    """What to do with bytes that are not valid in the encoding."""
    max_tokens: int | None = None
    """Stop after this many tokens."""
    shard_tokens: int = 100_000_000
    """Approximate number of tokens in a shard."""

    def __post_init__(self) -> None:
        check_positive(self, "shard_tokens", *(() if self.max_tokens is None else ("max_tokens",)))


@dataclass(frozen=True)
class CheckConfig:
    """A coordinate check of the built-in GPT on the text of Python's standard library."""

    rules: tuple[str, ...] = ("sp", "mup", "smupar")
    """Rules to check side by side. sp and mup are baselines; the exit code depends only on the others."""
    base_width: int = 64
    """Width at which the hyperparameters were tuned."""
    widths: tuple[int, ...] = (256,)
    """Widths of the models."""
    sparsities: tuple[float, ...] = (0.0, 0.75, 0.9375)
    """Shares of hidden weights that are zero."""
    pattern: str = "random"
    """random, bernoulli, fan_in, N:M, N:M-transposable, block-N or neuron."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimizer of the runs."""
    lr: float = 2**-6
    """Base learning rate."""
    init_std: float = RunConfig.init_std
    """Init std of hidden weights at base width, and of the embedding."""
    alpha_input: float = RunConfig.alpha_input
    """Factor on the embedded input."""
    alpha_output: float = RunConfig.alpha_output
    """Factor on the logits."""
    steps: int = 10
    """Steps of each run."""
    whole_run: int | None = None
    """Train this many steps instead, with warm-up and a learning rate that falls to zero, and report from which step on the
    sizes of updates drift. Pass the batch size and sequence length of your own runs."""
    weight_decay: float = RunConfig.weight_decay
    """Weight decay: at each step weights shrink by the learning rate times this. It matters over a whole run, and hardly in ten
    steps."""
    seeds: int = 3
    """Number of seeds; more seeds make intervals smaller."""
    depth: int = 2
    """Number of blocks."""
    depths: tuple[int, ...] = ()
    """Numbers of blocks to compare, instead of one depth."""
    base_depth: int | None = None
    """Depth at which factors are 1. Default: the smallest of depths."""
    depth_rule: Literal["completep", "depth-mup", "none"] | None = None
    """How factors follow the depth. Default: completep for SmuPar's rules, none for sp and mup."""
    head_dim: int = 32
    """Width of an attention head."""
    batch_size: int = 1
    """Sequences per step."""
    seq_len: int = 16
    """Tokens in a sequence. Keep it small: part of a token's update comes from other tokens' gradients, and this part shrinks
    with width under any rule."""
    device: str = "auto"
    """auto: a GPU if there is one."""
    threads: int = 0
    """Threads of the CPU; 0: one for each core, or OMP_NUM_THREADS. Beside other jobs fewer may be faster."""
    out: str = "runs/check"
    """Folder for check.png, check.html and check.json. Files of an earlier check are overwritten."""

    def __post_init__(self) -> None:
        check_positive(self, "steps", "seeds", "depth", "batch_size", "seq_len", "base_width")
        check_not_negative(self, "threads", "lr", "weight_decay", "init_std", "alpha_input", "alpha_output")
        check_positive(self, *(() if self.whole_run is None else ("whole_run",)))
        refuse(
            self.whole_run is not None and self.steps != type(self).steps,
            "--steps and --whole-run are both numbers of steps: pass one of them",
        )
        check_sparsities(*self.sparsities)
        refuse(not self.widths or min(self.widths) < 1, f"widths must be whole numbers from 1 on, got {self.widths}")
        check_not_too_large("width", *self.widths)
        for sparsity, width in product(filter(None, self.sparsities), self.widths):
            check_pattern_fits(self.pattern, width, self.head_dim, sparsity)
        check_choices(self)
        refuse(self.depths and min(self.depths) < 1, f"depths must be whole numbers from 1 on, got {self.depths}")
        check_not_too_large("depth", *self.depths)


@dataclass(frozen=True)
class GenerateConfig:
    """Sampling from a run, an export, or a model that transformers reads."""

    folder: str
    """Folder of a run, of one of its checkpoints, of an export, or of a model that transformers reads."""
    prompt: tuple[str, ...] = ("\n",)
    """One prompt or several. The text of one prompt is printed while it is generated. The texts of several are generated
    together."""
    tokens: int = 300
    """Number of tokens to generate; a text may end earlier."""
    temperature: float = 0.8
    """0: always take the most likely token."""
    top_k: int = 50
    """Choose among this many most likely tokens; 0: among all tokens."""
    seed: int = 0
    """Seed of the random numbers. Each prompt has its own generator with this seed."""
    device: str = "auto"
    """auto: a GPU if there is one."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """bf16: rounds weights and activations, and needs half the memory."""
    storage: Literal["auto", "dense", "packed"] = "auto"
    """packed: on a CPU, all layers keep only their non-zeros. auto: only the layers that this makes faster, as measured. dense:
    no layer."""

    def __post_init__(self) -> None:
        if isinstance(self.prompt, str):
            object.__setattr__(self, "prompt", (self.prompt,))
        check_choices(self)
        refuse(
            self.tokens < 1 or not 0 <= self.temperature < math.inf or self.top_k < 0,
            "--tokens must be above 0, --temperature and --top-k at least 0",
        )
        check_not_too_large("tokens", self.tokens)
        refuse(abs(self.seed) >= 2**63, "--seed must fit into 64 bits: choose a smaller number")
        empty = not self.prompt or "" in self.prompt
        refuse(empty, "the prompt is empty: give at least one character with --prompt")


@dataclass(frozen=True)
class ExportConfig:
    """How a model is exported as a folder to share."""

    folder: str
    """Folder of a run, of one of its checkpoints, or of a Hugging Face model that smupar parameterized."""
    out: str
    """Folder to write."""
    format: Literal["dense", "sparse"] = "dense"
    """dense: zeros are stored; sparse: only the kept weights are stored, as CSR."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the stored weights."""
    best: bool = False
    """Take the checkpoint with the lowest validation loss instead of the last."""


# The tasks of the paper's Table 2, in its order, as EleutherAI's harness calls them.
TASKS = ("arc_easy", "lambada_openai", "race", "piqa", "boolq")


@dataclass(frozen=True)
class TasksConfig:
    """The tasks that models are evaluated on."""

    tasks: tuple[str, ...] = TASKS
    """Any of arc_easy, lambada_openai, race, piqa and boolq."""
    data_dir: str | None = None
    """Folder with TASK.jsonl for each task. Default: the harness's own datasets, which it downloads."""
    limit: int | None = None
    """Use only the first documents of each task, up to this many."""

    def __post_init__(self) -> None:
        for task in self.tasks:
            refuse(task not in TASKS, f"unknown task {task!r}: choose among {', '.join(TASKS)}")
        refuse(
            not self.tasks or len(set(self.tasks)) < len(self.tasks),
            f"--tasks names each task once, at least one, got {' '.join(self.tasks) or 'none'}",
        )
        check_positive(self, *(() if self.limit is None else ("limit",)))


@dataclass(frozen=True)
class ScoringConfig:
    """How loglikelihoods are computed. Apart from max_length and rounding, nothing here changes the results."""

    device: str = "auto"
    """auto: a GPU if there is one."""
    batch_size: int = 16
    """Sequences in a forward pass."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """bf16 is for products and activations; weights and softmax stay fp32."""
    max_length: int = 2048
    """Longest input in tokens; the beginning of a longer text is cut off. If a model has fewer positions, their number is its
    limit."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "batch_size", "max_length")


@dataclass(frozen=True)
class EvalConfig:
    """The evaluation of models on the downstream tasks of the paper's Table 2."""

    folders: tuple[str, ...]
    """Folders of runs, checkpoints, exports, or models that transformers reads."""
    questions: TasksConfig = field(default_factory=TasksConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    out: str = "runs/eval"
    """Folder for results.json, table.md and table.csv. If you run the command again, it computes only what is missing."""

    def __post_init__(self) -> None:
        refuse(
            not self.folders, "no model: give the folder of a run, a checkpoint, an export, or a model that transformers reads"
        )
        refuse(len(set(self.folders)) < len(self.folders), "a folder is given twice: name each model once")
