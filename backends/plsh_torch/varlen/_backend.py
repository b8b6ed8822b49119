"""The backend object: lsh alone, on kernels that take no bias. Needs no torch to be imported."""

import importlib.util
import sys
from typing import Any

from plsh.backend import (
    SPEC_VERSION,
    AttentionOutput,
    Availability,
    Capabilities,
    Harness,
    Request,
)


class VarlenBackend:
    """Each sample one variable-length attention of torch's own kernels, with autograd.

    On CUDA ``torch.nn.attention.varlen``, in half precision; on the CPU the kernel of SDPA. It is
    how positional LSH runs where a kernel takes no bias, and the yardstick of backend "torch",
    which scores a pair once where this does it once for each sample.
    """

    name = "torch_varlen"
    spec_version = SPEC_VERSION

    def availability(self) -> Availability:
        """Say whether torch is installed."""
        if "torch" in sys.modules or importlib.util.find_spec("torch") is not None:
            return Availability(True)
        return Availability(False, "torch is not installed; pip install 'plsh[torch]'")

    def capabilities(self) -> Capabilities:
        """Declare what it can do."""
        return Capabilities(arrays=("torch",), methods=("lsh",), gradients="autograd")

    def can_run(self, request: Request) -> str | None:
        """Refuse nothing that is declared."""
        return None

    def attend(self, q: Any, k: Any, v: Any, request: Request) -> AttentionOutput:
        """Compute attention of checked tensors ``(B, H, N, D)``."""
        from ._attend import attend

        return attend(q, k, v, request)

    def harness(self) -> Harness:
        """Return the handles for tests and benchmarks."""
        from plsh.testing import harness_for

        return harness_for("torch")


BACKEND = VarlenBackend()
