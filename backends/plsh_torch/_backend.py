"""The backend object: hands a request to the operator. Needs no torch to be imported."""

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
from plsh.weights import StepWeight


class TorchBackend:
    """The single-pass band kernel on torch tensors: all methods and options, with autograd.

    On the CPU torch's own products, on CUDA Triton kernels; which a device can't run is said by the
    call, with the reason.
    """

    name = "torch"
    spec_version = SPEC_VERSION

    def availability(self) -> Availability:
        """Say whether torch is installed."""
        if "torch" in sys.modules or importlib.util.find_spec("torch") is not None:
            return Availability(True)
        return Availability(False, "torch is not installed; pip install 'plsh[torch]'")

    def capabilities(self) -> Capabilities:
        """Declare what it can do."""
        return Capabilities(arrays=("torch",), gradients="autograd", transforms=("compile", "vmap"))

    def can_run(self, request: Request) -> str | None:
        """Refuse hash families of the user's own, which an operator can't be handed."""
        weight = request.static.weight
        if not isinstance(weight, StepWeight):
            return None
        from ._recipe import FAMILIES

        if type(weight.family) in FAMILIES.values():
            return None
        return (
            f"it takes the families {', '.join(FAMILIES)}, got {type(weight.family).__name__}; "
            "pass its family.sample(…) as method, or backend='reference'"
        )

    def attend(self, q: Any, k: Any, v: Any, request: Request) -> AttentionOutput:
        """Compute attention of checked tensors ``(B, H, N, D)``."""
        from ._attend import attend

        return attend(q, k, v, request)

    def harness(self) -> Harness:
        """Return the handles for tests and benchmarks."""
        from plsh.testing import harness_for

        return harness_for("torch")


BACKEND = TorchBackend()
