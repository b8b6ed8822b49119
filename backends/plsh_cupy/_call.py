"""A request turned into launches: parameters, tables, temporaries and results."""

import functools
from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from plsh.backend import AttentionOutput, Gradients, Request
from plsh.compat import Array, dtype_name, kind, to_host
from plsh.weights import DecayWeight, StepWeight, TableWeight

from ._axis import MOST, Axis
from ._device import Device
from ._params import KINDS, PARAMS
from ._plan import Instance, fit_tensor_cores, instance_for, launches, scale_parts, split_heads
from ._tables import TABLES

__all__ = ["attend", "vjp"]


def attend(device: Device, q: Array, k: Array, v: Array, request: Request) -> AttentionOutput:
    """Compute attention of checked arrays ``(B, H, N, D)`` on their device."""
    call = _Call(device, q, k, v, request)
    out = device.empty((*q.shape[:3], v.shape[3]), request.static.dtype)
    lse = device.empty(tuple(q.shape[:3]), call.acc)
    call.view("out", out, "bhnd")
    call.view("lse", lse, "bhn")
    call.weigh(backward=False)
    call.launch("forward")
    return AttentionOutput(out, lse)


def vjp(
    device: Device,
    q: Array,
    k: Array,
    v: Array,
    output: AttentionOutput,
    grad_out: Array,
    grad_lse: Array | None,
    request: Request,
) -> Gradients:
    """Return the gradients by q, k, v and, under a decay, the slopes."""
    call = _Call(device, q, k, v, request, grad_out)
    dtype, decay = request.static.dtype, isinstance(request.static.weight, DecayWeight)
    grads = [device.empty(tuple(x.shape), dtype) for x in (q, k, v)]
    for name, grad in zip(("grad_q", "grad_k", "grad_v"), grads, strict=True):
        call.view(name, grad, "bhnd")
    call.view("out", output.out, "bhnd")
    call.view("lse", output.lse, "bhn")
    call.view("grad_out", grad_out, "bhnd")
    if grad_lse is not None:
        call.view("grad_lse", grad_lse, "bhn")
    call.view("delta", call.temporary(tuple(q.shape[:3]), call.acc), "bhn")
    by_slope = None
    if decay:
        parts = (*q.shape[:2], -(-q.shape[2] // call.instance("backward_queries").rows))
        call.view("by_slope", call.temporary(parts, "float64"), "bhn")
        by_slope = call.gradient_by_slopes()
    call.weigh(backward=True)
    call.launch("backward_queries")
    call.launch("backward_keys")
    if decay:
        call.launch("backward_slopes")
    call.end(*grads, *([] if by_slope is None else [by_slope]))
    return Gradients(grads[0], grads[1], grads[2], by_slope)


class _Call:
    """The parameters of one call, filled piece by piece."""

    def __init__(
        self, device: Device, q: Array, k: Array, v: Array, request: Request, *others: Array
    ) -> None:
        static, operands = request.static, request.arrays
        self.device, self.request = device, request
        self.acc = "float64" if static.dtype == "float64" else "float32"
        self.params: npt.NDArray[Any] = np.zeros((), PARAMS)
        self._alive: list[Array] = []
        self._temporaries: list[Array] = []
        samples = getattr(static.weight, "samples", 1)
        self.tensor = fit_tensor_cores(
            static.dtype,
            static.head_dim,
            static.value_dim,
            samples,
            device.limits,
            [device.locate(x) for x in (q, k, v, *others)],
        )
        factor, after = scale_parts(static.scale, static.dtype, self.tensor)
        numbers = {
            "batch": q.shape[0],
            "heads": static.heads,
            "kv_heads": static.kv_heads,
            "len_q": q.shape[2],
            "len_k": k.shape[2],
            "dim": static.head_dim,
            "value_dim": static.value_dim,
            "samples": samples,
            "scale": static.scale,
            "factor": factor,
            "after": after,
            "causal": static.causal,
        }
        for name, number in numbers.items():
            self.params[name] = number
        for name, x in (("q", q), ("k", k), ("v", v)):
            self.view(name, x, "bhnd")
        for name, offset in (("q", operands.q_offset), ("k", operands.k_offset)):
            self._offset(name, offset)
        if operands.segment_ids is not None:
            for name, ids in zip(("q_ids", "k_ids"), operands.segment_ids, strict=True):
                self.view(name, ids, "bn")
                self.params[f"{name}_kind"] = KINDS[dtype_name(ids)]

    def view(self, name: str, x: Array, axes: str) -> None:
        """Point the view `name` at an array, which lives until the end of the call."""
        self._alive.append(x)
        self.device.locate(x).fill(self.params, name, axes)

    def _table(self, name: str, key: Hashable, host: Any, axes: str) -> None:
        """Point the view `name` at a table that `host()` makes."""
        self.view(name, TABLES.get(self.device, (name, key), host), axes)

    def _offset(self, side: str, offset: Any) -> None:
        name = f"{side}_offset"
        if isinstance(offset, int):
            self.params[f"{side}_start"] = offset
        elif isinstance(offset, tuple):
            self._table(name, offset, lambda: np.array(offset, dtype=np.int64), "b")
            self.params[f"{name}_kind"] = KINDS["int64"]
        else:
            self.view(name, offset, "b" * offset.ndim)
            self.params[f"{name}_kind"] = KINDS[dtype_name(offset)]

    def weigh(self, *, backward: bool) -> None:
        """Fill in the weight: slopes and bandwidths, or blocks, and the order of the heads."""
        weight = self.request.static.weight
        self._bandwidths = weight.bandwidths
        if isinstance(weight, DecayWeight):
            self._table(
                "bandwidth",
                weight.bandwidths,
                lambda: np.array(weight.bandwidths, dtype=np.int32),
                "h",
            )
            self._slopes()
        elif isinstance(weight, TableWeight):
            self._labels(self.request.arrays.labels, weight.start, weight.stop)
        else:
            self._blocks(weight, backward)

    def _slopes(self) -> None:
        slopes = self.request.arrays.slopes
        if isinstance(slopes, tuple):
            axes = "bh" if slopes and isinstance(slopes[0], tuple) else "h"
            self._table("slopes", slopes, lambda: np.array(slopes, dtype=np.float64), axes)
            self.params["slopes_kind"] = KINDS["float64"]
        else:
            self.view("slopes", slopes, "bh" if slopes.ndim == 2 else "h")
            self.params["slopes_kind"] = KINDS[dtype_name(slopes)]

    def gradient_by_slopes(self) -> Array:
        """Allocate the gradient by slopes, of their shape; of their dtype if they are an array."""
        slopes, heads = self.request.arrays.slopes, self.request.static.heads
        if isinstance(slopes, tuple):
            shape: tuple[int, ...] = (heads,)
            if slopes and isinstance(slopes[0], tuple):
                shape = (len(slopes), heads)
            dtype = self.acc
        else:
            shape, dtype = tuple(slopes.shape), dtype_name(slopes)
            if "float" not in dtype:  # a gradient is no integer
                dtype = self.acc
        grad = self.device.empty(shape, dtype)
        self.view("grad_slopes", grad, "bh" if len(shape) == 2 else "h")
        self.params["grad_slopes_kind"] = KINDS[dtype]
        return grad

    def _blocks(self, weight: StepWeight, backward: bool) -> None:
        drawn = weight.bins
        if drawn is None:
            self._placed_blocks(weight, backward)
            return
        width, shift = drawn
        self._table("width", weight, lambda: width, "hd")
        self._table("shift", weight, lambda: shift, "hd")

    def _placed_blocks(self, weight: StepWeight, backward: bool) -> None:
        """Look blocks up in a table of labels: of the owned tokens, and as far as others go."""
        operands, batch = self.request.arrays, int(self.params["batch"])
        offsets = [self._read(x) for x in (operands.q_offset, operands.k_offset)]
        lengths = [int(self.params[name]) for name in ("len_q", "len_k")]
        axis = owned = Axis(offsets, lengths)
        if len(axis.spans) > 1:
            for side, offset in zip("qk", offsets, strict=True):
                places = np.broadcast_to(axis.places(offset), (batch,))
                self._offset(side, tuple(places.tolist()))
        queries = offsets[0].size * lengths[0]
        if self.request.static.causal and not backward and queries:
            owned = Axis(offsets[:1], lengths[:1])  # no block matters beyond the last query
        start, stop = axis.places([owned.spans[0][0], owned.spans[-1][1] - 1]).tolist()
        stop += 1
        key = (weight, axis.spans, start, stop)
        labels = TABLES.get(self.device, key, lambda: axis.labels(weight, start, stop))
        self._labels(labels, start, stop)

    def _labels(self, labels: Array, start: int, stop: int) -> None:
        if labels.shape[0] == 0 or labels.shape[2] == 0:  # then no token is visible
            labels, start, stop = np.zeros((1, labels.shape[1], 1), dtype=np.int32), 0, 1
        if kind(labels) == "numpy":
            labels = self.device.upload(np.ascontiguousarray(labels))
        self.view("labels", labels, "hdn")
        if labels.shape[0] == 1:  # one head of partitions serves all
            self.params["labels"]["head"] = 0
        self.params["label_start"], self.params["label_count"] = start, stop - start

    def _read(self, offset: Any) -> Any:
        if isinstance(offset, int | tuple):
            return np.array(offset, dtype=np.int64)
        if self.device.capturing:
            raise ValueError(
                "q_offset and k_offset must be numbers while a graph is recorded, for a family "
                f"without equal widths such as {type(self.request.static.weight).__name__}'s: "
                "its blocks are made on the host for the positions of the call"
            )
        return np.clip(to_host(offset).astype(np.int64), -MOST, MOST)

    def instance(self, kernel: str) -> Instance:
        """Return the instance of a kernel that serves this call."""
        static = self.request.static
        step = not isinstance(static.weight, DecayWeight)
        dims = (static.head_dim, static.value_dim)
        return instance_for(
            kernel, static.dtype, step, *dims, self.device.limits, tensor=self.tensor
        )

    def launch(self, kernel: str) -> None:
        """Launch a kernel over all that it owns."""
        params = self.params
        heads, length = int(params["heads"]), int(params["len_q"])
        batch = int(params["batch"])
        bandwidths: tuple[int, ...] = self._bandwidths
        if kernel == "backward_keys":
            group = heads // max(int(params["kv_heads"]), 1)
            heads, length = int(params["kv_heads"]), int(params["len_k"])
            bandwidths = tuple(max(bandwidths[h * group : (h + 1) * group]) for h in range(heads))
        rows = batch
        if kernel == "backward_slopes":  # it sums over batch rows unless slopes are per row
            rows = batch if params["grad_slopes"]["batch"] else 1
            params["tiles"] = -(-length // self.instance("backward_queries").rows)
        limits = self.device.limits
        instance = self.instance(kernel)
        for part, order in split_heads(
            instance, bandwidths, batch=rows, length=length, limits=limits
        ):
            self._table("order", order, functools.partial(np.array, order, dtype=np.int32), "h")
            for launch in launches(
                part,
                batch=rows,
                heads=len(order),
                length=length,
                dim=int(params["dim"]),
                value_dim=int(params["value_dim"]),
                limits=limits,
            ):
                params["first_block"] = launch.first_block
                if kernel != "backward_slopes":
                    params["tiles"] = launch.tiles
                self.device.run(launch, params)

    def temporary(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Allocate what only the kernels of this call see."""
        self._temporaries.append(self.device.empty(shape, dtype))
        return self._temporaries[-1]

    def end(self, *results: Array) -> None:
        """Keep the temporaries that a recorded graph writes again, as long as a result lives."""
        if self.device.capturing and self._temporaries:
            for result in results:
                self.device.hold(result, self._temporaries)
