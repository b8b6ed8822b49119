"""What the core needs to know of an array, whatever library made it.

The only module that imports ``array_api_compat``. It imports no array framework but NumPy: an
array is recognised by the modules of its classes, which costs nothing and which
``torch.compile`` can trace (``array_api_compat``'s own ``is_*_array`` sit behind ``lru_cache``,
about which Dynamo warns).
"""

import contextlib
import operator
import sys
from typing import Any, TypeAlias

import array_api_compat
import numpy as np
import numpy.typing as npt

Array: TypeAlias = Any
"""An array of any library: what the Python Array API standard describes. It has no usable
static type of its own yet, so the alias documents and does not check."""

_NO_ARRAYS = (type(None), int, float, complex, str, bytes, tuple, list)
_NUMPY = (np.ndarray, np.generic)
_ROOTS = {"torch": "torch", "jax": "jax", "jaxlib": "jax", "cupy": "cupy"}

_TO_NUMPY = {
    "torch": "{0}.detach().cpu().numpy()",
    "jax": "numpy.asarray({0})",
    "cupy": "cupy.asnumpy({0})",
    "array-api": "numpy.from_dlpack({0})",
}
_FROM_NUMPY = {
    "numpy": "{0}",
    "torch": "torch.from_numpy({0})",
    "jax": "jax.numpy.asarray({0})",
    "cupy": "cupy.asarray({0})",
    "array-api": "xp.asarray({0})",  # xp: the namespace of the others
}


def as_int(x: Any) -> int | None:
    """Return an integer of any library as an int; None if `x` is none: a bool, a float, an array.

    A plain int goes through untouched, so that ``torch.compile`` may keep it symbolic.
    """
    if isinstance(x, int):
        return None if isinstance(x, bool) else x
    try:
        return None if isinstance(x, np.bool_) else operator.index(x)
    except TypeError:
        return None


def as_python(x: Any) -> Any:
    """Return the values of an array or a scalar of a library as Python numbers, else `x` itself.

    A plain number goes through untouched, so that ``torch.compile`` may keep it symbolic.
    """
    return x if isinstance(x, int | float) or not hasattr(x, "tolist") else x.tolist()


def kind(x: object) -> str:
    """Name an array's library: numpy, torch, jax, cupy or array-api; "" if it is no array."""
    # torch.compile can walk the bases neither of these nor of builtin types.
    if isinstance(x, _NUMPY):
        return "numpy"
    if isinstance(x, _NO_ARRAYS):
        return ""
    for cls in type(x).__mro__:
        name = _ROOTS.get(cls.__module__.partition(".")[0])
        if name is not None:
            # Not by shape: asked for it, torch's nested tensors raise.
            return name if hasattr(x, "dtype") and hasattr(x, "ndim") else ""
    return "array-api" if hasattr(x, "__array_namespace__") else ""


def conversion(name: str, source: str, target: str) -> str:
    """Return the line of code that turns argument `name` of kind `source` into kind `target`."""
    on_host = _TO_NUMPY.get(source, "numpy.asarray({0})" if source == "" else "{0}").format(name)
    return _FROM_NUMPY.get(target, "{0}").format(on_host)


def dtype_name(x: Array) -> str:
    """Name the dtype without its library, such as ``float32``, ``bfloat16`` or ``int64``."""
    name = getattr(x.dtype, "name", None)
    return name if isinstance(name, str) else str(x.dtype).rpartition(".")[2]


def numpy_dtype(name: str) -> npt.DTypeLike:
    """Return NumPy's dtype of that name; bfloat16 is that of the package ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        found: npt.DTypeLike = ml_dtypes.bfloat16
        return found
    return np.dtype(name)


def namespace(x: Array) -> Any:
    """Return the Array API namespace of `x`."""
    if kind(x) == "torch":
        from array_api_compat import torch  # it imports torch, which must be there by now

        return torch
    return array_api_compat.array_namespace(x)


def device(x: Array) -> Any:
    """Return the device of `x`, as its namespace's creation functions take it."""
    return x.device if kind(x) == "torch" else array_api_compat.device(x)


def is_strided(x: Array) -> bool:
    """Whether an array is dense; torch has sparse and nested tensors too."""
    return kind(x) != "torch" or (x.layout == sys.modules["torch"].strided and not x.is_nested)


def same_device(x: Array, y: Array) -> bool:
    """Whether two arrays of one framework live on one device; True where tracing hides it.

    JAX arrays may live on several: JAX itself decides then.
    """
    if kind(x) == "jax":
        if is_traced(x) or is_traced(y):
            return True
        here, there = x.devices(), y.devices()
        return len(here) > 1 or len(there) > 1 or bool(here == there)
    return bool(getattr(x, "device", None) == getattr(y, "device", None))


def swap_heads(x: Array) -> Array:
    """Exchange the sequence and head axes, ``(…, N, H, D) <-> (…, H, N, D)``, as a view."""
    if hasattr(x, "swapaxes"):
        return x.swapaxes(-3, -2)
    axes = (0, 2, 1, 3) if x.ndim == 4 else (1, 0, 2)
    return x.__array_namespace__().permute_dims(x, axes)


def fill_heads(x: Array, heads: int) -> Array:
    """Repeat a 0-d array over the heads: ``() -> (H,)``, differentiable."""
    if kind(x) == "torch":
        return x.expand(heads)
    return x.__array_namespace__().broadcast_to(x, (heads,))


def is_traced(x: object) -> bool:
    """Whether the values of `x` cannot be read: it is being traced, or has none (fake, meta)."""
    name = kind(x)
    if name == "torch":
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling():
            return True
        unreadable = (torch._C._functorch.is_functorch_wrapped_tensor(x), x.device.type == "meta")  # type: ignore[attr-defined]
        return any(unreadable) or type(x).__name__ == "FakeTensor"
    if name == "jax":
        return any(cls.__name__ == "Tracer" for cls in type(x).__mro__)
    if name == "numpy" and "torch" in sys.modules:
        return bool(sys.modules["torch"].compiler.is_dynamo_compiling())
    return False


def wants_gradient(x: object) -> bool:
    """Whether autograd would record an operation on `x` (torch; a traced array never says)."""
    if kind(x) != "torch" or not x.requires_grad:  # type: ignore[attr-defined]
        return False
    return bool(sys.modules["torch"].is_grad_enabled())


def without_autocast(x: Array) -> contextlib.AbstractContextManager[Any]:
    """Hold off torch's autocast, which would compute wide products in half precision."""
    if kind(x) != "torch":
        return contextlib.nullcontext()
    held: contextlib.AbstractContextManager[Any] = sys.modules["torch"].autocast(
        x.device.type, enabled=False
    )
    return held


def to_host(x: Array) -> npt.NDArray[Any]:
    """Copy a concrete array to NumPy, bfloat16 as float32. The caller has asked `is_traced`."""
    name = kind(x)
    if name == "torch":
        x = x.detach()
        return np.array((x.float() if dtype_name(x) == "bfloat16" else x).cpu().numpy())
    if name == "cupy":
        return np.array(x.get())
    host = np.array(np.from_dlpack(x) if name == "array-api" else x)
    return host.astype(np.float32) if host.dtype.name == "bfloat16" else host
