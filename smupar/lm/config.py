"""What a run is made of, as frozen dataclasses. No torch in here, so that ``smupar --help`` stays fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """A GPT with ALiBi and SwiGLU, head size fixed as width grows, tied embedding, no biases."""

    width: int = 256
    depth: int = 2
    head_dim: int = 32
    vocab_size: int = 256

    def __post_init__(self) -> None:
        for name in ("width", "depth", "head_dim", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive whole number, got {getattr(self, name)}")
        if self.width % self.head_dim:
            raise ValueError(f"width {self.width} is not a multiple of head_dim {self.head_dim}: choose another width")

    @property
    def num_heads(self) -> int:
        return self.width // self.head_dim

    @property
    def ff_width(self) -> int:
        """8/3 of the width, as usual for SwiGLU, rounded down to a multiple of the head size."""
        return 8 * self.width // 3 // self.head_dim * self.head_dim


@dataclass(frozen=True)
class TrainConfig:
    """One run. The defaults are the demo: a sparse GPT on the text of Python's standard library, a minute on a laptop."""

    model: ModelConfig = field(default_factory=ModelConfig)
    rule: str = "smupar"
    """sp, mup, smupar, smupar-init-only or smupar-lr-only."""
    base_width: int = 64
    """Width at which lr, init_std and the alphas were tuned."""
    sparsity: float | None = None
    """Share of hidden weights set to zero, in [0, 1). Default 0.9375, or what an N:M pattern says."""
    pattern: str = "random"
    """random, bernoulli, fan_in, N:M, N:M-transposable, block-N or neuron."""
    lr: float = 2**-6
    init_std: float = 0.087
    alpha_input: float = 9.17
    alpha_output: float = 1.095
    weight_decay: float = 0.0
    steps: int = 400
    batch_size: int = 8
    seq_len: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sparsity is not None and not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity must lie in [0, 1), got {self.sparsity}: 0.75 keeps a quarter of the hidden weights")
        for name in ("steps", "batch_size", "seq_len", "base_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive whole number, got {getattr(self, name)}")

    @property
    def density(self) -> float | None:
        """What ``parameterize`` takes; None leaves it to an N:M pattern."""
        if self.sparsity is None:
            return None if ":" in self.pattern else 0.0625
        return 1 - self.sparsity


@dataclass(frozen=True)
class CheckConfig:
    """A coordinate check of the built-in GPT on the text of Python's standard library."""

    rules: tuple[str, ...] = ("sp", "mup", "smupar")
    """Side by side; sp and mup are baselines, the exit code is about the others."""
    base_width: int = 64
    widths: tuple[int, ...] = (256,)
    sparsities: tuple[float, ...] = (0.0, 0.75, 0.9375)
    """Share of hidden weights set to zero."""
    pattern: str = "random"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = 2**-6
    steps: int = 10
    seeds: int = 3
    depth: int = 2
    head_dim: int = 32
    batch_size: int = 8
    seq_len: int = 64
    out: str = "runs/check"
    """Folder for check.png, check.html and check.json."""
