"""Hugging Face transformers: models, folders and the Trainer. transformers is imported only when this package is used.

families      known architectures: which fields of a config change with the width
inputs        small inputs for probes
models        ``parameterize`` makes a model of transformers follow a rule; it builds the base from a config
folders       ``save_pretrained`` saves masks and plan, ``load`` restores them, ``export`` writes a plain model
folding       folds every factor and scale of a model into the weights of a plain one
training      an optimizer from ``TrainingArguments`` and a callback, for ``transformers.Trainer``

Names are imported on first use, after a check of the version of transformers, because these files import names that other
versions lack.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from smupar.output.optional import optional

if TYPE_CHECKING:
    from smupar.integrations.huggingface.families import base_config
    from smupar.integrations.huggingface.folders import export, load, save
    from smupar.integrations.huggingface.models import parameterize, set_attention_scale
    from smupar.integrations.huggingface.training import SmuparCallback, make_optimizer

_VERSION = optional("transformers", "smupar's Hugging Face integration", "hf").__version__
if not _VERSION.startswith("5."):
    raise ImportError(
        f"smupar's Hugging Face integration is for transformers 5.x, this is {_VERSION}: pip install 'smupar[hf]'"
    )

_WHERE = {
    "parameterize": "models",
    "base_config": "families",
    "set_attention_scale": "models",
    "save": "folders",
    "load": "folders",
    "export": "folders",
    "make_optimizer": "training",
    "SmuparCallback": "training",
}

__all__ = ["SmuparCallback", "base_config", "export", "load", "make_optimizer", "parameterize", "save", "set_attention_scale"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
