"""Harnesses of the array libraries: how tests and benchmarks make and differentiate arrays."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import compat
from ..backend import Harness
from ..compat import Array

__all__ = ["double_precision", "harness_for"]


def harness_for(kind: str) -> Harness:
    """Return the harness of one kind of arrays; imports the library.

    Parameters
    ----------
    kind : {"numpy", "torch", "jax", "cupy", "array-api"}
        "array-api" stands for array-api-strict.

    Returns
    -------
    Harness
        With `vjp`, `jvp`, `jit`, `vmap` and `compile` where the library has them. 64-bit dtypes
        may need `double_precision`.

    Raises
    ------
    ValueError
        `kind` is another.
    ImportError
        The library is not installed.

    Notes
    -----
    Spec: BCK-9.

    Examples
    --------
    >>> harness_for("numpy").asarray([1.0, 2.0], dtype="float16").dtype
    dtype('float16')
    """
    if kind not in _MAKERS:
        raise ValueError(f"kind must be one of {', '.join(_MAKERS)}, got {kind!r}")
    return _MAKERS[kind]()


def double_precision(kind: str) -> contextlib.AbstractContextManager[Any]:
    """Hold a library's setting under which it has 64-bit dtypes: JAX needs one.

    Examples
    --------
    >>> with double_precision("numpy"):
    ...     pass
    """
    if kind != "jax":
        return contextlib.nullcontext()
    import jax

    held: contextlib.AbstractContextManager[Any] = jax.enable_x64(True)
    return held


def _numpy() -> Harness:
    return Harness(_numpy_array, compat.to_host, _nothing)


def _numpy_array(x: Any, dtype: str, device: str | None = None) -> Array:
    _check_device(device, ("cpu",))
    return np.asarray(x).astype(compat.numpy_dtype(dtype))


def _nothing(x: Array) -> None:
    """Everything is done when a call returns."""


def _check_device(device: str | None, known: tuple[str, ...]) -> None:
    if device is not None and device not in known:
        raise ValueError(f"device must be one of {', '.join(known)}, got {device!r}")


def _array_api() -> Harness:
    import array_api_strict

    def asarray(x: Any, dtype: str, device: str | None = None) -> Array:
        return array_api_strict.asarray(_numpy_array(x, dtype, device))

    return Harness(asarray, compat.to_host, _nothing)


def _torch() -> Harness:
    import torch

    devices = ("cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count())))

    def asarray(x: Any, dtype: str, device: str | None = None) -> Array:
        _check_device(device, devices)
        return torch.tensor(np.asarray(x)).to(device or "cpu", getattr(torch, dtype))

    def synchronize(x: Array) -> None:
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)

    def vjp(
        f: Callable[..., Any], inputs: Sequence[Array], cotangents: Sequence[Array]
    ) -> list[Array]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        # Inputs without elements may not take part at all: their gradient is empty, not an error.
        pulled = torch.autograd.grad(f(*leaves), leaves, list(cotangents), materialize_grads=True)
        return list(pulled)

    def jvp(f: Callable[..., Any], inputs: Sequence[Array], tangents: Sequence[Array]) -> Any:
        return torch.func.jvp(f, tuple(inputs), tuple(tangents))

    def mapped(f: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
        found: Callable[..., Any] = torch.func.vmap(f, in_dims=in_axes)
        return found

    def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
        torch._dynamo.reset()  # it gives up on a function that it has compiled a few times
        return torch.compile(f, fullgraph=True, backend="aot_eager")

    return Harness(
        asarray,
        compat.to_host,
        synchronize,
        devices,
        vjp=vjp,
        jvp=jvp,
        vmap=mapped,
        compile=compiled,
    )


def _jax() -> Harness:
    import jax
    import jax.numpy as jnp

    held = {f"{d.platform}:{d.id}": d for d in jax.devices()}

    def asarray(x: Any, dtype: str, device: str | None = None) -> Array:
        _check_device(device, tuple(held))
        made = jnp.asarray(np.asarray(x), dtype=dtype)
        return made if device is None else jax.device_put(made, held[device])

    def vjp(
        f: Callable[..., Any], inputs: Sequence[Array], cotangents: Sequence[Array]
    ) -> list[Array]:
        # Not jitted: that were a new program each time; what f jits itself is compiled once.
        return list(jax.vjp(f, *inputs)[1](tuple(cotangents)))

    def jvp(f: Callable[..., Any], inputs: Sequence[Array], tangents: Sequence[Array]) -> Any:
        return jax.jvp(f, tuple(inputs), tuple(tangents))

    return Harness(
        asarray,
        compat.to_host,
        jax.block_until_ready,
        tuple(held),
        vjp=vjp,
        jvp=jvp,
        jit=jax.jit,
        vmap=jax.vmap,
    )


def _cupy() -> Harness:
    import cupy

    devices = tuple(f"cuda:{i}" for i in range(cupy.cuda.runtime.getDeviceCount()))

    def asarray(x: Any, dtype: str, device: str | None = None) -> Array:
        _check_device(device, devices)
        with cupy.cuda.Device(devices.index(device) if device else None):
            return cupy.asarray(_numpy_array(x, dtype))

    def synchronize(x: Array) -> None:
        x.device.synchronize()

    return Harness(asarray, compat.to_host, synchronize, devices)


_MAKERS: dict[str, Callable[[], Harness]] = {
    "numpy": _numpy,
    "torch": _torch,
    "jax": _jax,
    "cupy": _cupy,
    "array-api": _array_api,
}
