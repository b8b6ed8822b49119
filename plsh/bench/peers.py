"""What a user would take instead: each library's own ways to causal or symmetric ALiBi.

Each is written as well as its library lets one, masks made before the clock starts where that is
faster, and runs on the arrays, device and threads that plsh runs on.
"""

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..compat import Array
from ..testing import AttentionInputs, harness_for
from .case import Case, Runner, by_autograd

_ROWS = 512
"""Queries that dense NumPy computes at a time, so that their scores fit a cache."""
_FLEX_WIDTH = 16
"""Reach of windowed FlexAttention in 1/slope: what it leaves out weighs below exp(-16) = 1.1e-7."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another implementation of the same attention.

    Attributes
    ----------
    name : str
        As ``plsh bench --against`` takes it.
    kind : str
        Of its arrays: numpy, torch or jax.
    summary : str
    make : callable
        ``make(case) -> forward(q, k, v)``.
    dense : float
        Bytes that it needs beside its inputs, in `Case.score_bytes`.
    causal_only, compiled : bool
        Whether it has no symmetric form; whether it compiles for seconds at each length.
    """

    name: str
    kind: str
    summary: str
    make: Callable[[Case], Callable[..., Array]]
    dense: float
    causal_only: bool = False
    compiled: bool = False

    def reason(self, case: Case) -> str | None:
        """Say why it can't run a case here; None if it can."""
        if importlib.util.find_spec(self.kind) is None:
            return f"{self.kind} is not installed; pip install 'plsh[{self.kind}]'"
        if self.causal_only and not case.causal:
            return "it has no form without a causal mask"
        devices = harness_for(self.kind).devices
        wanted = case.device or devices[0]
        if wanted not in devices and not (
            wanted.startswith("cpu") and devices[0].startswith("cpu")
        ):
            return f"it can't run on {wanted}; {self.kind} has {', '.join(devices)}"
        if self.compiled and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            return "its compiler needs a C++ compiler; install g++"
        return None

    def runner(self, case: Case, inputs: AttentionInputs | None = None) -> Runner:
        """Return its runner; imports its library."""
        harness = harness_for(self.kind)
        on_cpu = case.device is None or case.device.startswith("cpu")
        forward = self.make(case)
        # FlexAttention has no backward on the CPU.
        gradients = None if self.compiled and on_cpu else by_autograd(harness, forward)
        return Runner(self.name, harness, case, forward, gradients, inputs)


def _numpy_dense(case: Case) -> Callable[..., Array]:
    """Blocks of rows, and under a causal mask no key of the future."""
    n = case.length
    dtype: Any = np.float64 if case.dtype == "float64" else np.float32
    apart = np.arange(min(_ROWS, n), dtype=dtype)[:, None] - np.arange(n, dtype=dtype)

    def forward(q: Array, k: Array, v: Array) -> Array:
        out = np.empty_like(q)
        for h, slope in enumerate(case.slopes):
            keys, values = k[0, h].astype(dtype), v[0, h].astype(dtype)
            queries = q[0, h].astype(dtype) * dtype(case.head_dim**-0.5)
            for low in range(0, n, _ROWS):
                high = min(low + _ROWS, n)
                seen = high if case.causal else n
                scores = queries[low:high] @ keys[:seen].T
                bias = apart[: high - low, :seen] + dtype(low)
                if not case.causal:
                    np.abs(bias, out=bias)
                bias *= dtype(-slope)
                if case.causal:
                    bias[:, low:][np.triu_indices(high - low, 1)] = -np.inf
                scores += bias
                scores -= scores.max(axis=1, keepdims=True)
                np.exp(scores, out=scores)
                total = scores.sum(axis=1, keepdims=True)
                out[0, h, low:high] = (scores @ values[:seen]) / total
        return out

    return forward


def _torch_device(case: Case) -> str:
    return case.device if case.device is not None and case.device.startswith("cuda") else "cpu"


def _sdpa_mask(case: Case) -> Callable[..., Array]:
    import torch

    at = torch.arange(case.length, device=_torch_device(case))
    dtype = torch.float64 if case.dtype == "float64" else torch.float32
    apart = (at[:, None] - at).to(dtype)
    slopes = torch.tensor(case.slopes, dtype=dtype, device=at.device)
    mask = (-slopes[:, None, None] * apart.abs())[None]
    if case.causal:
        mask.masked_fill_(apart < 0, -torch.inf)
    mask = mask.to(getattr(torch, case.dtype))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return lambda q, k, v: sdpa(q, k, v, attn_mask=mask)


def _sdpa_dim(case: Case) -> Callable[..., Array]:
    """Slope * j rides in one more dim of q and k; the row's own term, slope * i, cancels."""
    import torch

    functional = torch.nn.functional
    make: dict[str, Any] = {"device": _torch_device(case), "dtype": getattr(torch, case.dtype)}
    n, scale = case.length, case.head_dim**-0.5
    bias = torch.tensor(case.slopes, dtype=torch.float64)[:, None] * torch.arange(n) / scale
    key = bias[None, :, :, None].to(**make)
    one = torch.ones(1, case.heads, n, 1, **make)

    def forward(q: Array, k: Array, v: Array) -> Array:
        wide = torch.cat([q, one], -1), torch.cat([k, key], -1), functional.pad(v, (0, 1))
        out = functional.scaled_dot_product_attention(*wide, is_causal=True, scale=scale)
        return out[..., : case.head_dim]

    return forward


def _sdpa_plain(case: Case) -> Callable[..., Array]:
    import torch

    sdpa = torch.nn.functional.scaled_dot_product_attention
    return lambda q, k, v: sdpa(q, k, v, is_causal=case.causal)


def _flex(windowed: bool) -> Callable[[Case], Callable[..., Array]]:
    def make(case: Case) -> Callable[..., Array]:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        device = _torch_device(case)
        slopes = torch.tensor(case.slopes, device=device)
        widths = (_FLEX_WIDTH / slopes).long()

        def bias(score: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
            return score - slopes[h] * (i - j).abs()

        def visible(b: Array, h: Array, i: Array, j: Array) -> Array:
            seen = i >= j if case.causal else i == i
            return seen & ((i - j).abs() <= widths[h]) if windowed else seen

        n = case.length
        mask = create_block_mask(visible, None, case.heads, n, n, device=device)
        torch._dynamo.reset()  # it gives up on a function that it has compiled a few times
        run = torch.compile(flex_attention, dynamic=False)
        return lambda q, k, v: run(q, k, v, score_mod=bias, block_mask=mask)

    return make


def _jax_bias(case: Case) -> Callable[..., Array]:
    import jax
    import jax.numpy as jnp

    def forward(q: Array, k: Array, v: Array) -> Array:
        # Made inside, where XLA fuses it: as a constant of the program it takes a third longer.
        at = jnp.arange(case.length)
        apart = jnp.abs(at[:, None] - at).astype(case.dtype)
        bias = -(jnp.asarray(case.slopes, case.dtype)[:, None, None] * apart)[None]
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        out = jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=case.causal)
        return out.swapaxes(1, 2)

    return forward


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("numpy-dense", "numpy", "dense NumPy, blocks of rows", _numpy_dense, 0.1),
        Peer("sdpa-mask", "torch", "SDPA with the dense ALiBi mask", _sdpa_mask, 4),
        Peer(
            "sdpa-dim", "torch", "SDPA, ALiBi in one more head dim", _sdpa_dim, 0, causal_only=True
        ),
        Peer("sdpa-plain", "torch", "SDPA without a bias: another function", _sdpa_plain, 0),
        Peer("flex", "torch", "FlexAttention with ALiBi, dense", _flex(False), 4, compiled=True),
        Peer(
            "flex-window", "torch", "FlexAttention, window 16/slope", _flex(True), 4, compiled=True
        ),
        Peer("jax-bias", "jax", "jax.nn.dot_product_attention with a bias", _jax_bias, 6),
    )
}
"""By name."""
