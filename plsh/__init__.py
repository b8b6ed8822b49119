"""plsh: attention with linear biases (ALiBi) in near-linear time, by Positional LSH or exactly."""

from . import registry, theory
from .alibi import alibi_slopes
from .attention import attention, attention_vjp
from .backend import AttentionOutput, Gradients
from .errors import BackendUnavailableError, UnknownBackendError, UnsupportedByBackendError
from .hashing import FixedBlocks, IndependentCuts, PowerLawBinning, RandomBinning
from .methods import Exact, PositionalLSH, Window
from .partition import Partition, PartitionSet
from .reduction import merge, reduction
from .registry import backends, register_backend
from .segments import segments_from_lengths

__version__ = "0.1.0"

__all__ = [
    "AttentionOutput",
    "BackendUnavailableError",
    "Exact",
    "FixedBlocks",
    "Gradients",
    "IndependentCuts",
    "Partition",
    "PartitionSet",
    "PositionalLSH",
    "PowerLawBinning",
    "RandomBinning",
    "UnknownBackendError",
    "UnsupportedByBackendError",
    "Window",
    "__version__",
    "alibi_slopes",
    "attention",
    "attention_vjp",
    "backends",
    "merge",
    "reduction",
    "register_backend",
    "segments_from_lengths",
    "theory",
]

registry.load_installed()
