"""The backend object; importable, and telling why it is unavailable, without jax."""

import importlib.util
from typing import Any

from plsh.backend import (
    SPEC_VERSION,
    AttentionOutput,
    Availability,
    Capabilities,
    Harness,
    Request,
)


class JaxBackend:
    """The single-pass band kernel in ``jax.numpy`` and ``lax``, under every transform of JAX."""

    name = "jax"
    spec_version = SPEC_VERSION

    def availability(self) -> Availability:
        """Say whether jax is installed."""
        if importlib.util.find_spec("jax") is None:
            return Availability(False, "jax is not installed; pip install 'plsh[jax]'")
        return Availability(True)

    def capabilities(self) -> Capabilities:
        """Declare what it can do."""
        return Capabilities(
            arrays=("jax",),
            gradients="autograd",
            transforms=("jvp", "jit", "vmap", "second_order"),
        )

    def can_run(self, request: Request) -> str | None:
        """Return None: every request for JAX arrays can be served."""
        return None

    def attend(self, q: Any, k: Any, v: Any, request: Request) -> AttentionOutput:
        """Compute attention of checked arrays ``(B, H, N, D)``."""
        from ._call import attend

        return attend(q, k, v, request)

    def harness(self) -> Harness:
        """Return the handles for tests and benchmarks."""
        from plsh.testing import harness_for

        return harness_for("jax")


BACKEND = JaxBackend()
