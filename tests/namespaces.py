"""The array libraries that tests run on, each in its strictest or most precise settings."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from plsh import compat

STRICT_FLAGS = {
    "api_version": "2025.12",
    "boolean_indexing": False,
    "data_dependent_shapes": False,
    "enabled_extensions": (),
}
"""array-api-strict at its strictest: nothing beyond the core of the standard's latest version."""


class Namespace(NamedTuple):
    """One array library: how to make arrays, what to hold while it runs, how it differentiates."""

    name: str
    asarray: Callable[[Any, str], Any]
    scope: Callable[[], contextlib.AbstractContextManager[Any]]
    vjp: Callable[..., tuple[Any, list[Any]]] | None = None
    """``vjp(f, inputs, cotangents) -> (outputs, gradients)``, of arrays to a tuple of arrays."""

    @property
    def array(self) -> Callable[[Any, str], Any]:
        """What the suite's calls make arrays with."""
        return self.asarray


def to_numpy(x: Any) -> np.ndarray:
    """Copy to NumPy; bfloat16 as float32."""
    values = compat.to_host(x)
    return values.astype(np.float32) if compat.dtype_name(x) == "bfloat16" else values


def _numpy_array(x: Any, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        import ml_dtypes

        return np.asarray(x).astype(ml_dtypes.bfloat16)
    return np.asarray(x).astype(dtype)


def _strict_array(x: Any, dtype: str) -> Any:
    import array_api_strict

    return array_api_strict.asarray(np.asarray(x).astype(dtype))


@contextlib.contextmanager
def strict_flags() -> Iterator[None]:
    """Hold array-api-strict at its strictest; restore what was."""
    import array_api_strict

    before = array_api_strict.get_array_api_strict_flags()
    array_api_strict.set_array_api_strict_flags(**STRICT_FLAGS)
    try:
        yield
    finally:
        array_api_strict.set_array_api_strict_flags(**before)


def _torch_array(x: Any, dtype: str) -> Any:
    import torch

    return torch.tensor(np.asarray(x)).to(getattr(torch, dtype))


def _torch_vjp(
    f: Callable[..., Any], inputs: Sequence[Any], cotangents: Sequence[Any]
) -> tuple[Any, list[Any]]:
    import torch

    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = f(*leaves)
    return outputs, list(torch.autograd.grad(outputs, leaves, list(cotangents)))


def _jax_array(x: Any, dtype: str) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(np.asarray(x), dtype=dtype)


@contextlib.contextmanager
def _jax_x64() -> Iterator[None]:
    import jax

    with jax.enable_x64(True):
        yield


def _jax_vjp(
    f: Callable[..., Any], inputs: Sequence[Any], cotangents: Sequence[Any]
) -> tuple[Any, list[Any]]:
    import jax

    def both(inputs: Any, cotangents: Any) -> Any:
        outputs, pullback = jax.vjp(f, *inputs)
        return outputs, list(pullback(cotangents))

    # One program: op by op, XLA compiles each operation for each shape. (Level 0 gives wrong
    # gradients: NaN where the same program at level 1 is finite.)
    fast = jax.jit(both, compiler_options={"xla_backend_optimization_level": 1})
    return fast(tuple(inputs), tuple(cotangents))


NUMPY = Namespace("numpy", _numpy_array, contextlib.nullcontext)
STRICT = Namespace("strict", _strict_array, strict_flags)
TORCH = Namespace("torch", _torch_array, contextlib.nullcontext, _torch_vjp)
JAX = Namespace("jax", _jax_array, _jax_x64, _jax_vjp)
NAMESPACES = {ns.name: ns for ns in (NUMPY, STRICT, TORCH, JAX)}
