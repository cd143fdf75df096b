"""The configuration of a run, as frozen dataclasses. The command line takes its flags from them. This file does not import
torch, so that ``smupar --help`` stays fast.

``RunConfig`` is everything that decides the result, and its hash is the run's id. ``Execution`` says how the run is carried
out: where, on how many devices, how often it is saved.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property
from pathlib import PurePath
from typing import Literal

from smupar.lm.config.fields import default_of
from smupar.lm.config.mask_methods import MASK_METHODS, MaskMethod
from smupar.lm.config.run_id import FIRST_FIELDS, id_of
from smupar.lm.config.validation import (
    check_choices,
    check_model,
    check_not_negative,
    check_positive,
    check_run,
    n_of_m,
)
from smupar.output.json_files import DamagedFileError, as_record, parse_object, sealed_json
from smupar.refusals import refuse
from smupar.rules import DEPTH_RULES, get_rule

_FEW_MOVES = 5
StorageName = Literal["dense", "csr", "2:4", "block", "auto"]

# The text that needs no download: the source of the running Python's standard library, as bytes.
STANDARD_LIBRARY = "stdlib"


def name_of_text(data: str) -> str:
    """The normalised name of a text: d/ becomes d. A folder ./stdlib keeps its prefix, since stdlib is the default text."""
    path = str(PurePath(data))
    return data if path == STANDARD_LIBRARY else path


def padded_vocab(vocab_size: int) -> int:
    """The size rounded up to a multiple of 64, which makes products fast on GPUs."""
    return -(-vocab_size // 64) * 64


@dataclass(frozen=True)
class ModelConfig:
    """A GPT whose head size does not grow with the width. The defaults are the paper's: ALiBi, SwiGLU, tied embedding."""

    width: int = 256
    """Width of the residual stream, a multiple of head_dim."""
    depth: int = 2
    """Number of blocks."""
    head_dim: int = 32
    """Width of an attention head. It does not grow with the model."""
    vocab_size: int = 256
    """Number of different tokens. It is raised to what --data needs."""
    ff_ratio: float | None = None
    """Inner width of the MLP divided by the width of the model. Default: 8/3 for SwiGLU, 4 for GELU."""
    ff_multiple: int | None = None
    """The inner width is rounded down to a multiple of this. Default: head_dim."""
    positions: Literal["alibi", "rotary", "learned", "none"] = "alibi"
    """How the model knows the positions of tokens."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Activation of the MLP."""
    biases: bool = False
    """Give linear layers and norms a bias. The unembedding never has one."""
    tied: bool = True
    """Use one matrix for embedding and unembedding."""
    residual_factor: bool = False
    """Multiply both residual outputs of a block by 1 / sqrt(2 depth)."""
    context: int = 2048
    """Longest sequence. Only for learned positions."""

    def __post_init__(self) -> None:
        check_model(self)

    @property
    def num_heads(self) -> int:
        return self.width // self.head_dim

    @property
    def inner_width(self) -> int:
        ratio = Fraction(8, 3) if self.activation == "swiglu" else Fraction(4)
        if self.ff_ratio is not None:
            ratio = Fraction(self.ff_ratio).limit_denominator(1000)  # 2.3 means 23/10, not the float just below
        multiple = self.ff_multiple or self.head_dim
        return max(1, int(ratio * self.width) // multiple) * multiple


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides the result of a run. The defaults are the demo, a sparse GPT that trains in a minute on a
    laptop."""

    model: ModelConfig = field(default_factory=ModelConfig)
    rule: str = "smupar"
    """sp, mup, smupar, smupar-init-only, smupar-lr-only or smupar-aligned."""
    kappa: float | None = None
    """For smupar-aligned: the number of weights per neuron at which the part of an update on which these weights agree is as
    large as the other part, as measured on the proxy (docs/rules.md)."""
    base_width: int = 64
    """Width at which lr, init_std and the alphas were tuned."""
    base_depth: int | None = None
    """Number of blocks of the model on which lr, init_std and the alphas were tuned. Default: --depth."""
    depth_rule: Literal["completep", "depth-mup", "none"] | None = None
    """How factors follow the depth. completep divides branches by depth / base depth, depth-mup by the square root of that
    ratio. none changes nothing. Default: completep for SmuPar's rules, none for sp and mup."""
    sparsity: float | None = None
    """Share of hidden weights that are zero, in [0, 1). With pattern neuron it is the share of neurons. Default: 0.9375, or
    with pattern N:M what the pattern implies."""
    pattern: str = "random"
    """random, bernoulli, fan_in, N:M, N:M-transposable, block-N or neuron."""
    allocation: Literal["uniform", "er", "erk"] = "uniform"
    """How the sparsity is divided among layers."""
    dynamic: Literal["none", "rigl", "set", "gmp", "imp"] = "none"
    """How masks move. rigl drops weights and grows others by their gradients. set drops weights and grows others at random. gmp
    prunes gradually, from dense to the sparsity. imp prunes in rounds, and rewinds to the first weights after each round."""
    rounds: int = 4
    """For imp: number of prunings. The run has one more round than prunings. All rounds have the same number of steps, and each
    runs the whole schedule."""
    mask_every: int = 100
    """Steps between two moves of the masks."""
    mask_stop: float = 0.75
    """Share of the run after which masks no longer move."""
    drop_fraction: float = 0.3
    """Share of the active weights that rigl and set drop in the first move. It falls to 0 along a cosine."""
    correction: Literal["moment", "fixed"] = "moment"
    """For gmp and imp. moment: the learning rate follows the current density. fixed: init and learning rate fit the final
    density from the start, as in the paper."""
    follow: str | None = None
    """File with the trace of a proxy that the learning rates of hidden layers follow (measured updates)."""
    law: str = ""
    """How updates are measured, for controls in studies: effect (default), rms, trust, spectral or function. Options follow
    after commas: every=25, old=0.95, tokens=512, held-out."""
    record: bool = False
    """Measure what each update does to every hidden layer, and write trace.json for other runs to follow."""
    init_std: float = 0.087
    """Init std of hidden weights at base width, and of the embedding."""
    alpha_input: float = 9.17
    """Factor on the embedded input."""
    alpha_output: float = 1.095
    """Factor on the logits, in addition to the rule's."""

    optimizer: str = "adamw"
    """adamw, adam, sgd, muon (with AdamW for what is not hidden), lion, nadam, radam, adamax, rmsprop or adagrad."""
    lr: float = 2**-6
    """Base learning rate: the peak value, as tuned at base width."""
    rest_lr: float | None = None
    """Learning rate of a second optimizer, AdamW, for everything but the hidden weights. Default: no second optimizer; for
    muon, lr."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the averages in Adam's family and Lion."""
    momentum: float = 0.9
    """Momentum of sgd and muon."""
    eps: float = 1e-8
    """Epsilon of the optimizer."""
    eps_scaling: Literal["constant", "width"] = "constant"
    """width: epsilon shrinks with the width, like the gradients."""
    weight_decay: float = 0.1
    """Weight decay: at each step weights shrink by the learning rate times this."""
    decay: Literal["independent", "coupled", "held"] = "independent"
    """independent: LR times decay stays as tuned. coupled: the same decay everywhere, as in the paper's reference code. held:
    hidden weights do not decay, but are scaled back to their initial size after each step."""
    decayed: Literal["all", "matrices", "hidden", "vectors"] = "all"
    """Which parameters weight decay shrinks: all, all but norms and biases, only hidden weights, or only norms and biases."""
    clip: float | None = None
    """Gradients with a larger norm are clipped to this norm."""
    schedule: Literal["linear", "linear-to-zero", "constant", "cosine"] = "linear"
    """linear falls to a tenth of the peak, as in most of the paper's runs. linear-to-zero falls to 0. cosine falls to a
    tenth."""
    warmup: int | None = None
    """Steps of linear warm-up. Default: a tenth of all steps."""
    steps: int = 400
    """Number of training steps."""
    batch_size: int = 8
    """Sequences per step, over all ranks and micro-batches."""
    seq_len: int = 64
    """Tokens in a sequence."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """bf16 is for products and activations; weights and optimizer state stay fp32."""
    data: str = STANDARD_LIBRARY
    """Folder made by `smupar data prepare`; or stdlib, the source of Python's standard library as bytes."""
    valid_data: str | None = None
    """Folder with text to validate on. Default: the last 5 % of data, which are never trained on."""
    valid_batches: int = 20
    """Number of batches in a validation."""
    seed: int = 0
    """Seed of masks, initial weights and batches."""

    def __post_init__(self) -> None:
        check_run(self)

    @property
    def exact_sparsity(self) -> float | None:
        """The sparsity; exact if the pattern fixes it: 2/3 for the pattern 1:3, even if 0.667 was typed."""
        fixed = n_of_m(self.pattern)
        return 1 - fixed[0] / fixed[1] if fixed and self.sparsity else self.sparsity

    @property
    def normalised(self) -> RunConfig:
        """The same run in the unique form that is hashed and stored."""
        data = self.data and name_of_text(self.data)
        valid_data = self.valid_data and name_of_text(self.valid_data)
        sparsity, kappa = self.exact_sparsity, self.used_kappa
        if (data, valid_data, sparsity, kappa) == (self.data, self.valid_data, self.sparsity, self.kappa):
            return self
        return replace(self, data=data, valid_data=valid_data, sparsity=sparsity, kappa=kappa)

    @property
    def used_kappa(self) -> float | None:
        """kappa if the rule uses it, else None, since comparisons of rules give it to all runs."""
        return self.kappa if get_rule(self.rule).two_terms else None

    @property
    def portable(self) -> RunConfig:
        """The normalised run, with the file name instead of the path of its trace, so that its id does not depend on the
        trace's folder."""
        return replace(self.normalised, follow=PurePath(self.follow).name) if self.follow else self.normalised

    @property
    def density(self) -> float | None:
        """The final density; None if an N:M pattern decides it."""
        if self.exact_sparsity is None:
            return None if ":" in self.pattern else 0.0625
        return 1 - self.exact_sparsity

    @property
    def start_density(self) -> float | None:
        """The density at the start, which ``parameterize`` gets."""
        return 1.0 if self.prunes else self.density

    @property
    def residual_depth(self) -> int:
        """The depth in the model's own factor 1 / sqrt(2 depth). If a depth rule scales the branches, this is the base's depth,
        so that depth does not count twice."""
        return self.base_depth if self.scales_branches and self.base_depth is not None else self.model.depth

    @property
    def scales_branches(self) -> bool:
        """Whether a depth rule scales residual branches, in a model that is deeper than its base."""
        return DEPTH_RULES[self.depth_rule or get_rule(self.rule).depth].alpha is not None

    @property
    def mask_method(self) -> MaskMethod:
        """How the run moves its masks."""
        return MASK_METHODS[self.dynamic]

    @property
    def prunes(self) -> bool:
        """Whether the run starts dense and prunes."""
        return self.mask_method.prunes

    @property
    def round_steps(self) -> int:
        """Steps of a round, after which the learning-rate schedule starts again; without rounds, all steps."""
        return self.steps // (self.rounds + 1) if self.mask_method.in_rounds else self.steps

    @property
    def warmup_steps(self) -> int:
        return self.round_steps // 10 if self.warmup is None else self.warmup

    @property
    def num_tokens(self) -> int:
        return self.steps * self.batch_size * self.seq_len

    @cached_property
    def id(self) -> str:
        """The run's id: a hash of the whole configuration, equal for equal runs."""
        return id_of(self.portable)

    @property
    def last_move(self) -> int:
        """The last step at which masks move."""
        return int(self.mask_stop * self.steps)

    @property
    def few_moves_warning(self) -> str | None:
        """A warning for runs whose masks hardly move, as in short runs; None if they move often enough to learn from."""
        if "mask_every" not in self.mask_method.fields or self.density == 1:
            return None
        num = -(-self.last_move // self.mask_every) if self.prunes else self.last_move // self.mask_every
        if num >= _FEW_MOVES:
            return None
        times = "once" if num == 1 else f"{num} times"
        return f"masks move {times} in {self.steps} steps: a smaller --mask-every than {self.mask_every} moves them more often"

    def to_json(self) -> str:
        return sealed_json(asdict(self.normalised))

    @classmethod
    def from_json(cls, text: str, *, source: str = "this text", remedy: str = "restore it") -> RunConfig:
        """Reads what ``to_json`` wrote, also in an older version. ``source`` and ``remedy`` are for errors."""
        values = parse_object(text, source=source, remedy=remedy)
        refuse("rule" not in values, f"{source} is not the configuration of a run: {remedy}")
        try:
            return as_record(cls, values, source=source, remedy=remedy).normalised
        except DamagedFileError:
            raise
        except (ValueError, ArithmeticError) as error:
            raise DamagedFileError(f"{source} is damaged ({error}): {remedy}") from error


# All fields that were added after the first published runs, with the values that earlier runs implied.
LATER_FIELDS = {
    item.name: default_of(item) for kind in (RunConfig, ModelConfig) for item in fields(kind) if item.name not in FIRST_FIELDS
}


@dataclass(frozen=True)
class Execution:
    """How a run is carried out. Apart from rounding, nothing here changes its result."""

    out: str | None = None
    """Folder of the run. Default: runs/<name made from the configuration>. If you start a run again, it continues from its last
    checkpoint."""
    device: str = "auto"
    """auto: a GPU if there is one."""
    threads: int = 0
    """Threads of the CPU; 0: one for each core, or OMP_NUM_THREADS. Beside other jobs fewer may be faster."""
    compile: bool | None = None
    """Use torch.compile. Default: only on GPUs."""
    graph: bool = False
    """Capture the whole step as a CUDA graph, which is for small models on one GPU with AdamW or Adam and one micro-batch per
    step."""
    storage: StorageName = "dense"
    """csr: masked weights keep and multiply only their non-zeros. 2:4, block: the same on an NVIDIA GPU, for the patterns
    2:4-transposable and block-N. auto: for each layer whatever is measured to be fastest. On GPUs this needs --dtype bf16."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun. ddp: every rank has the whole model; fsdp: every rank has a shard of it (FSDP2)."""
    micro_batch: int = 0
    """Sequences per rank in one forward pass; larger batches accumulate gradients. 0: as many as should fit on the GPU."""
    save_every: int = 0
    """Steps between checkpoints. 0: one every five minutes. The end always has a checkpoint."""
    from_step: int | None = None
    """Go back to the checkpoint of this step and delete everything after it, including the run's results. 0: start again. To
    resume, leave it out."""
    keep: int = 2
    """Number of checkpoints to keep, besides the best one."""
    valid_every: int = 0
    """Steps between validations. 0: five validations in a run."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl. The GPU waits for the host only at these steps."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, into the run's folder."""
    observe: bool = False
    """Record sizes of outputs, gradients, updates and weights of hidden layers at steps 1, 2, 3, 4, 6, 8, 11, 16, ... and write
    them to observed.json."""
    wandb: bool = False
    """Also write the metrics to Weights & Biases; WANDB_MODE=offline keeps them in the run's folder."""
    full: bool = False
    """Print every number of every parameter in the plan, not a summary by kind of layer."""
    peak_tflops: float | None = None
    """Peak speed of one device in TFLOP/s, for the share of peak in the progress line. Default on a GPU: the datasheet's, or
    else the measured speed of a large product. On a CPU no share is shown unless you give the peak."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "keep", "log_every")
        check_not_negative(
            self, "threads", "micro_batch", "save_every", "valid_every", *(() if self.from_step is None else ("from_step",))
        )
        refuse(
            self.peak_tflops is not None and not 0 < self.peak_tflops < math.inf,
            f"peak_tflops must be a number above 0, got {self.peak_tflops}",
        )


@dataclass(frozen=True)
class MachineConfig:
    """The machine for which a dry run computes the cost of a run."""

    gpus: int = 1
    """Number of GPUs, for --dry-run."""
    gpu_gib: float = 139.0
    """Memory of one GPU, for --dry-run. Default: an H200's."""
    peak_share: float = 0.45
    """Share of the peak FLOP/s, for --dry-run. The peak is --peak-tflops; default: an H200's 990."""
