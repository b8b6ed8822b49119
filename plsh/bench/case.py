"""A problem to measure, and what runs it: calls that return when their work is done."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from .. import registry
from ..alibi import slopes_of
from ..attention import attention, attention_vjp
from ..backend import Harness
from ..compat import Array
from ..errors import UnsupportedByBackendError
from ..methods import Method
from ..testing import AttentionInputs, make_inputs
from .machine import share_threads

DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of a number of each dtype."""


@dataclass(frozen=True, slots=True)
class Case:
    """One attention problem, batch 1, ALiBi slopes, normal q, k, v of seed 0.

    Attributes
    ----------
    length, heads, head_dim : int
        n, H and D; as many key heads as query heads.
    dtype : {"float32", "float16", "bfloat16", "float64"}
    causal : bool
    device : str or None
        One of the harness's; None is its default.
    """

    length: int
    heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    causal: bool = True
    device: str | None = None

    @property
    def slopes(self) -> tuple[float, ...]:
        """The published ALiBi slopes of that many heads."""
        return slopes_of(self.heads)

    @property
    def score_bytes(self) -> int:
        """Bytes of a dense ``(H, n, n)`` matrix of the case's dtype."""
        return self.heads * self.length**2 * DTYPES[self.dtype]

    @property
    def array_bytes(self) -> int:
        """Bytes of one of q, k, v."""
        return self.heads * self.length * self.head_dim * DTYPES[self.dtype]

    def inputs(self) -> AttentionInputs:
        """Draw q, k, v and the cotangent, ``(1, H, n, D)`` NumPy arrays."""
        return make_inputs(
            1, self.heads, self.heads, self.length, head_dim=self.head_dim, dtype=self.dtype
        )


class Runner:
    """One implementation on the arrays of one case.

    Parameters
    ----------
    name : str
    harness : Harness
        Of the implementation's library: it makes the arrays and waits for results.
    case : Case
    forward : callable
        ``forward(q, k, v) -> out``, compiled where the library compiles (JAX).
    gradients : callable, optional
        ``gradients(q, k, v, grad_out) -> (dq, dk, dv)``, the forward included.
    inputs : AttentionInputs, optional
        Those of the case, if they are drawn already.
    """

    def __init__(
        self,
        name: str,
        harness: Harness,
        case: Case,
        forward: Callable[..., Array],
        gradients: Callable[..., Any] | None,
        inputs: AttentionInputs | None = None,
    ) -> None:
        share_threads()
        drawn = case.inputs() if inputs is None else inputs
        device = case.device if case.device in harness.devices else None
        self.name, self.harness = name, harness
        self._arrays = [
            harness.asarray(x, dtype=case.dtype, device=device)
            for x in (drawn.q, drawn.k, drawn.v, drawn.grad_out)
        ]
        compiled = harness.jit or (lambda f: f)
        self._forward = compiled(forward)
        self._gradients = None if gradients is None else compiled(gradients)

    @property
    def has_gradients(self) -> bool:
        """Whether `training` can be called."""
        return self._gradients is not None

    def forward(self) -> Array:
        """Compute the output and wait for it."""
        out = self._forward(*self._arrays[:3])
        self.harness.synchronize(out)
        return out

    def training(self) -> Any:
        """Compute the output and the gradients of q, k, v, and wait for them."""
        if self._gradients is None:
            raise UnsupportedByBackendError(f"{self.name} has no gradients here")
        found = self._gradients(*self._arrays)
        for x in found:
            self.harness.synchronize(x)
        return found

    def output(self) -> npt.NDArray[Any]:
        """Return the output as a NumPy array ``(1, H, n, D)``."""
        return self.harness.to_numpy(self.forward())


def by_autograd(harness: Harness, forward: Callable[..., Array]) -> Callable[..., Any] | None:
    """Return ``gradients`` of a `Runner` by the library's own differentiation, if it has any."""
    pull = harness.vjp
    if pull is None:
        return None
    return lambda q, k, v, grad: pull(lambda *x: (forward(*x),), (q, k, v), (grad,))


def ours(backend: str, method: Method, case: Case, inputs: AttentionInputs | None = None) -> Runner:
    """Return the runner of a plsh backend, named "plsh", on its first kind of arrays.

    Raises
    ------
    UnknownBackendError, BackendUnavailableError
        As for `plsh.attention`.

    Examples
    --------
    >>> from plsh import Window
    >>> ours("numpy", Window(4), Case(16, heads=2, head_dim=4)).output().shape
    (1, 2, 16, 4)
    """
    found = registry.find(backend, "numpy")
    harness, way = found.harness(), found.capabilities().gradients
    options: dict[str, Any] = {"method": method, "causal": case.causal, "backend": backend}

    def forward(q: Array, k: Array, v: Array) -> Array:
        return attention(q, k, v, **options)

    def by_vjp(q: Array, k: Array, v: Array, grad: Array) -> Any:
        result = attention(q, k, v, return_lse=True, **options)
        return attention_vjp(q, k, v, result, grad, **options)[:3]

    gradients = {"vjp": by_vjp, "autograd": by_autograd(harness, forward), None: None}[way]
    return Runner("plsh", harness, case, forward, gradients, inputs)
