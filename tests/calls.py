"""A call of attention described by a few words, with its yardsticks: what `test_attention` runs.

`Call` names the options; `run` makes the arrays, calls `plsh.attention` and compares output, lse
and gradients with the float64 oracle. `pairwise` covers all pairs of options with few calls.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from namespaces import NAMESPACES, Namespace

import plsh
from plsh import testing
from plsh.conformance.calls import SEED, SHORT, pairwise

__all__ = ["SEED", "Call", "check_call", "pairwise"]


@dataclass(frozen=True)
class Call:
    """One call; each field is a word of the test's id."""

    method: str = "exact"  # exact, window, windows (per head), lsh, lsh-iid, set, set1
    heads: tuple[int, int] = (4, 2)
    lengths: tuple[int, int] = (33, 33)
    dims: tuple[int, int] = (16, 16)
    batch: int | None = 2
    causal: bool = False
    scale: float | None = None
    offsets: str = "none"  # none, both, cache, batch
    segments: str = "none"  # none, one, pair
    layout: str = "bhsd"
    return_lse: bool = True
    dtype: str = "float64"
    namespace: str = "numpy"
    std: float = 1.0
    samples: int = 5

    def __str__(self) -> str:
        (heads, kv_heads), (len_q, len_k), (dim, value_dim) = self.heads, self.lengths, self.dims
        words = [
            self.namespace,
            SHORT[self.dtype],
            "B-" if self.batch is None else f"B{self.batch}",
            f"H{heads}:{kv_heads}",
            f"Nq{len_q}",
            f"Nk{len_k}",
            f"D{dim}" if dim == value_dim else f"D{dim}:{value_dim}",
            self.method,
        ]
        words += ["causal"] * self.causal
        words += [] if self.scale is None else [f"scale{self.scale:g}"]
        words += [] if self.offsets == "none" else [f"at_{self.offsets}"]
        words += [] if self.segments == "none" else [f"seg_{self.segments}"]
        words += ["bshd"] * (self.layout == "bshd") + ["lse"] * self.return_lse
        return "-".join(words)

    @property
    def ns(self) -> Namespace:
        return NAMESPACES[self.namespace]

    @property
    def rows(self) -> int:
        return 1 if self.batch is None else self.batch

    @cached_property
    def inputs(self) -> testing.AttentionInputs:
        """The inputs, ``(B, H, N, D)``, in NumPy."""
        seed = sum(self.lengths) * 1000 + self.dims[0]
        shape = (self.rows, *self.heads, *self.lengths, *self.dims)
        return testing.make_inputs(*shape, self.dtype, seed, self.std)

    @cached_property
    def positions(self) -> tuple[Any, Any]:
        """(q_offset, k_offset): numbers, or one per batch row."""
        len_q, len_k = self.lengths
        if self.offsets == "both":
            return 5, 2
        if self.offsets == "batch" and self.batch is not None:
            return tuple(4 + 3 * b for b in range(self.rows)), tuple(
                9 - 4 * (b % 3) for b in range(self.rows)
            )
        if self.offsets == "cache" or len_q != len_k:
            first = 3 + max(0, len_q - len_k)
            return first + len_k - len_q, first
        return 0, 0

    @cached_property
    def segment_ids(self) -> Any:
        """Runs of equal ids with padding between; a pair where the lengths differ."""
        if self.segments == "none":
            return None
        rng = np.random.default_rng(7)

        def ids(length: int) -> np.ndarray:
            runs = np.cumsum(rng.random((self.rows, length)) < 4 / max(length, 1), axis=1)
            return np.where(rng.random(runs.shape) < 0.1, -1, runs).astype(np.int32)

        len_q, len_k = self.lengths
        if self.segments == "one" and len_q == len_k:
            return ids(len_q)
        return ids(len_q), ids(len_k)

    @cached_property
    def slopes(self) -> tuple[float, ...]:
        """Steep to flat; the last of several is 0."""
        heads = self.heads[0]
        steps = [float(np.float32(0.5 * 0.4**h)) for h in range(heads)]
        return (*steps[:-1], 0.0) if heads > 2 else tuple(steps)

    @cached_property
    def widths(self) -> Any:
        heads = self.heads[0]
        if self.method == "window":
            return 7
        return tuple((20, 0, 3, 200)[h % 4] for h in range(heads))

    @cached_property
    def partitions(self) -> plsh.PartitionSet:
        """The blocks that lsh must see, of all positions that occur."""
        ends = [
            max(np.atleast_1d(first).max(initial=0), 0) + n
            for first, n in zip(self.positions, self.lengths, strict=True)
        ]
        shared = self.method == "set1"
        slopes = self.slopes[:1] if shared else self.slopes
        family = plsh.RandomBinning(tuple(1 / m if m else float("inf") for m in slopes))
        sampler = "iid" if self.method == "lsh-iid" else "stratified"
        return family.sample(self.samples, int(max(ends)), seed=SEED, sampler=sampler)

    @cached_property
    def weight(self) -> dict[str, Any]:
        """What the oracle is told of the positional weight."""
        if self.method == "exact":
            return {"slopes": self.slopes}
        if self.method.startswith("window"):
            widths = np.broadcast_to(self.widths, (self.heads[0],))
            return {"slopes": self.slopes, "widths": widths}
        labels = self.partitions.labels()  # (H or 1, s, n)
        at = [
            np.broadcast_to(np.asarray(first, dtype=int), (self.rows,))[:, None] + np.arange(n)
            for first, n in zip(self.positions, self.lengths, strict=True)
        ]
        rows = [
            testing.step_weight(*(labels[..., np.maximum(x[b], 0)] for x in at))
            for b in range(self.rows)
        ]
        heads, (len_q, len_k) = self.heads[0], self.lengths
        shape = (self.rows, heads, len_q, len_k)
        return {"weight": np.broadcast_to(np.array(rows), shape) if rows else np.zeros(shape)}

    @cached_property
    def yardsticks(self) -> tuple[testing.OracleResult, testing.PlainResult]:
        """Oracle and plain computation."""
        inputs = self.inputs
        q_offset, k_offset = self.positions
        call = {
            **self.weight,
            "causal": self.causal,
            "scale": self.scale,
            "q_offset": q_offset,
            "k_offset": k_offset,
            "segment_ids": self.segment_ids,
            "grad_out": inputs.grad_out,
            "grad_lse": inputs.grad_lse if self.return_lse else None,
        }
        return testing.oracle(*inputs[:3], **call), testing.plain_attention(
            *inputs[:3], dtype=self.dtype, **call
        )

    @property
    def is_decay(self) -> bool:
        return self.method == "exact" or self.method.startswith("window")

    def method_object(self) -> Any:
        if self.method == "exact":
            return plsh.Exact()
        if self.method.startswith("window"):
            return plsh.Window(self.widths)
        if self.method.startswith("set"):
            return self.partitions
        sampler = "iid" if self.method == "lsh-iid" else "stratified"
        return plsh.PositionalLSH(self.samples, sampler=sampler, seed=SEED)

    def arrange(self, x: Any) -> Any:
        """Give a ``(B, H, N, D)`` array the caller's layout."""
        x = x if self.batch is not None else x[0, ...]
        return x.swapaxes(-3, -2) if self.layout == "bshd" else x

    def keywords(self) -> dict[str, Any]:
        """The keywords of the call, less slopes; arrays are of the namespace."""
        asarray = self.ns.asarray
        ids = self.segment_ids
        if ids is not None:
            pair = tuple(
                asarray(x if self.batch is not None else x[0], "int32")
                for x in (ids if isinstance(ids, tuple) else (ids,))
            )
            ids = pair if len(pair) == 2 else pair[0]
        q_offset, k_offset = self.positions
        if isinstance(q_offset, tuple) and self.namespace == "torch":
            q_offset, k_offset = asarray(q_offset, "int64"), np.array(k_offset)
        elif self.offsets == "none" and self.lengths[0] == self.lengths[1]:
            q_offset = None
        return {
            "method": self.method_object(),
            "causal": self.causal,
            "scale": self.scale,
            "q_offset": q_offset,
            "k_offset": k_offset,
            "segment_ids": ids,
            "layout": self.layout,
            "return_lse": self.return_lse,
            "backend": "reference",
        }

    def arrays(self, which: slice = slice(None)) -> list[Any]:
        """q, k, v, grad_out (and grad_lse as they are), in layout, of the namespace."""
        *full, grad_lse = self.inputs
        found = [self.ns.asarray(self.arrange(x), self.dtype) for x in full]
        lse_dtype = "float64" if self.dtype == "float64" else "float32"
        rows = grad_lse if self.batch is not None else grad_lse[0]
        return [*found, self.ns.asarray(rows, lse_dtype)][which]

    def arranged(self, result: Any) -> Any:
        """Give a yardstick the caller's layout."""
        return result._replace(
            lse=result.lse if self.batch is not None else result.lse[0],
            **{name: self.arrange(getattr(result, name)) for name in ("out", "q", "k", "v")},
        )


def check_call(call: Call) -> None:
    """Output, lse, and gradients where the namespace differentiates, against the oracle."""
    expected, plain = (call.arranged(x) for x in call.yardsticks)
    with call.ns.scope():
        q, k, v, grad_out, grad_lse = call.arrays()
        keywords = call.keywords()
        by_slope = call.is_decay
        slopes = None if call.method.startswith("set") else call.slopes

        def f(*inputs: Any) -> tuple[Any, ...]:
            m = inputs[3] if len(inputs) > 3 else slopes
            result = plsh.attention(*inputs[:3], slopes=m, **keywords)
            return tuple(result) if call.return_lse else (result,)

        cotangents = (grad_out, grad_lse) if call.return_lse else (grad_out,)
        if call.ns.vjp is None:
            outputs, grads = f(q, k, v), None
        else:
            inputs = [q, k, v]
            if by_slope:
                dtype = "float64" if call.dtype == "float64" else "float32"
                inputs.append(call.ns.asarray(slopes, dtype))
            outputs, grads = call.ns.vjp(f, inputs, cotangents)
        testing.assert_attention_close(outputs[0], expected.out, plain.out, like=q)
        if call.return_lse:
            testing.assert_output_close(plsh.AttentionOutput(*outputs), expected, plain, like=q)
        if grads is not None:
            testing.assert_gradients_close(grads, expected, plain, like=q)
