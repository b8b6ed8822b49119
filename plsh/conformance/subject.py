"""The backend under test, as the suite drives it: arrays by its harness, every call by its name."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import compat, registry
from ..attention import attention, attention_vjp
from ..backend import AttentionOutput, Backend, Capabilities, Gradients
from ..compat import Array
from ..testing import Measured, double_precision, harness_for

__all__ = ["Subject"]

_FLOATING = ("float16", "bfloat16", "float32", "float64")


class Subject:
    """A registered, available backend with the arrays that it is tested on.

    Parameters
    ----------
    name : str
        Of the backend.
    arrays : str, optional
        Kind of arrays, for a backend that takes several. None: those of the backend's harness.
    device : str, optional
        One of the harness's devices. None: the first.
    full : bool, default False
        Whether the long tests run, too.

    Raises
    ------
    UnknownBackendError, BackendUnavailableError
        As for `plsh.attention`.
    ValueError
        The backend does not take such arrays, or has no such device.
    """

    def __init__(
        self,
        name: str,
        arrays: str | None = None,
        device: str | None = None,
        full: bool = False,
    ) -> None:
        self.backend: Backend = registry.find(name, "")
        self.name, self.full = name, full
        self.capabilities: Capabilities = self.backend.capabilities()
        if arrays is None:
            self.harness = self.backend.harness()
        elif arrays in self.capabilities.arrays:
            self.harness = harness_for(arrays)
        else:
            taken = ", ".join(self.capabilities.arrays)
            raise ValueError(f"backend {name!r} takes arrays of {taken}, got {arrays!r}")
        if device is not None and device not in self.harness.devices:
            known = ", ".join(self.harness.devices) or "none"
            raise ValueError(f"backend {name!r} has the devices {known}, got {device!r}")
        self.device = device
        self.kind = compat.kind(self.harness.asarray(np.zeros(1), dtype="float32", device=device))
        self._dtypes = [name for name in _FLOATING if self._makes(name)]
        self.measured: list[Measured] = []

    def _makes(self, dtype: str) -> bool:
        """Whether the array library has a dtype at all."""
        try:
            with double_precision(self.kind):
                made = self.harness.asarray(np.zeros(1), dtype=dtype, device=self.device)
        except (TypeError, ValueError, NotImplementedError):
            return False
        return compat.dtype_name(made) == dtype

    @property
    def differentiates(self) -> bool:
        """Whether gradients can be had with these arrays."""
        own = self.capabilities.gradients
        return own == "vjp" or (own == "autograd" and self.harness.vjp is not None)

    def lacks(self, need: str) -> str | None:
        """Return None if something that a test needs is declared, else what is not.

        A need is "gradients", "vjp", "autograd", or "dtype:…", "method:…", "transform:…",
        "kind:…" and a name, or "head dim:…" and a number.
        """
        what, _, name = need.partition(":")
        if what == "gradients":
            found = self.differentiates
        elif what in ("vjp", "autograd"):
            found = self.capabilities.gradients == what and self.differentiates
        elif what == "kind":
            found = self.kind == name
        elif what == "head dim":
            found = int(name) <= (self.capabilities.max_head_dim or math.inf)
        elif what == "dtype":
            found = name in self.capabilities.dtypes and name in self._dtypes
        elif what == "transform":
            tool = getattr(self.harness, "vjp" if name == "second_order" else name)
            found = name in self.capabilities.transforms and tool is not None
        else:
            found = name in getattr(self.capabilities, f"{what}s")
        return None if found else need.replace(":", " ")

    def array(self, x: Any, dtype: str) -> Array:
        """Make an array of the backend's kind, on the device."""
        return self.harness.asarray(x, dtype=dtype, device=self.device)

    def host(self, x: Array) -> npt.NDArray[Any]:
        """Copy to NumPy."""
        return self.harness.to_numpy(x)

    def attention(self, q: Array, k: Array, v: Array, **keywords: Any) -> Any:
        """Call `plsh.attention` on this backend."""
        result = attention(q, k, v, backend=self.name, **keywords)
        self.harness.synchronize(result[0] if isinstance(result, tuple) else result)
        return result

    def gradients(
        self,
        q: Array,
        k: Array,
        v: Array,
        grad_out: Array,
        grad_lse: Array | None = None,
        **keywords: Any,
    ) -> tuple[AttentionOutput, Gradients]:
        """Return output and gradients, in the way that the backend declares.

        Where autograd makes them, those by slopes are None unless `slopes` is an array of q's kind.
        """
        output = self.attention(q, k, v, return_lse=True, **keywords)
        if self.capabilities.gradients == "vjp":
            grads = attention_vjp(
                q, k, v, output, grad_out, grad_lse, backend=self.name, **keywords
            )
            return output, grads
        inputs = [q, k, v]
        if compat.kind(keywords.get("slopes")) == self.kind:
            inputs.append(keywords.pop("slopes"))

        def f(*inputs: Array) -> tuple[Array, ...]:
            own = {"slopes": inputs[3], **keywords} if len(inputs) > 3 else keywords
            result = attention(*inputs[:3], return_lse=True, backend=self.name, **own)
            return tuple(result) if grad_lse is not None else (result.out,)

        cotangents = (grad_out,) if grad_lse is None else (grad_out, grad_lse)
        found = self.vjp(f, inputs, cotangents)
        return output, Gradients(*found, *[None] * (4 - len(found)))

    def vjp(
        self, f: Callable[..., Any], inputs: Sequence[Array], cotangents: Sequence[Array]
    ) -> Sequence[Array]:
        """Apply the harness's vjp."""
        if self.harness.vjp is None:
            raise ValueError(f"the harness of backend {self.name!r} has no vjp")
        return self.harness.vjp(f, inputs, cotangents)

    def record(self, *measured: Measured) -> None:
        """Keep errors for the report."""
        self.measured.extend(measured)
