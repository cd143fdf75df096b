"""Models that smupar is tried on, made from tiny configs with random weights. docs/models.py makes a page of them."""

from tests.support.architectures.architecture import Architecture
from tests.support.architectures.language import DECODERS, OTHERS
from tests.support.architectures.plain import PLAIN
from tests.support.architectures.vision import SEEING

__all__ = ["ALL", "PLAIN", "TRANSFORMERS", "Architecture"]

TRANSFORMERS = (*DECODERS, *OTHERS, *SEEING)
ALL = {architecture.name: architecture for architecture in (*TRANSFORMERS, *PLAIN)}
