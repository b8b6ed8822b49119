"""What several modules share: problems with arrays, positions and segments of their own."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from plsh import testing
from plsh.backend import AttentionOutput, Gradients
from plsh.conformance.subject import Subject
from plsh.hashing import RandomBinning
from plsh.methods import Exact, PositionalLSH, Window, window_width
from plsh.partition import PartitionSet

__all__ = [
    "DTYPES",
    "METHODS",
    "NAMES",
    "SLOPES",
    "Problem",
    "assert_same",
    "bits",
    "dtype_of",
    "join",
    "make",
    "method_of",
    "rows",
    "wide",
]

Array = npt.NDArray[Any]

DTYPES = ("float16", "bfloat16", "float32", "float64")
METHODS = ("exact", "window", "lsh")
SLOPES = (0.5, 0.125, 0.03125, 0.0)
"""One per query head, steep to none; exact in every dtype."""

_OBJECTS: dict[str, Any] = {
    "exact": Exact(),
    "window": Window((9, 4, 0, 30)),
    "lsh": PositionalLSH(5, seed=5),
    "lsh-iid": PositionalLSH(4, sampler="iid", seed=(6, 1)),
    "set": RandomBinning(tuple(1 / m if m else math.inf for m in SLOPES)).sample(4, 500, seed=7),
}
NAMES = [*METHODS, "lsh-iid", pytest.param("set", marks=pytest.mark.may_refuse)]
"""Every kind of method, for four heads."""


def method_of(name: str) -> dict[str, Any]:
    """Return the method object of a name, and its slopes: keywords of `Problem`."""
    return {"method": _OBJECTS[name], "slopes": None if name == "set" else SLOPES}


def wide(dtype: str) -> str:
    """Return the accumulation dtype."""
    return "float64" if dtype == "float64" else "float32"


def dtype_of(subject: Subject) -> str:
    """Return a declared dtype, for laws that hold in each alike."""
    order = ("float32", "float64", "bfloat16", "float16")
    return next(dtype for dtype in order if dtype in subject.capabilities.dtypes)


@dataclass(frozen=True, eq=False)
class Problem:
    """A call in NumPy: q, k, v ``(B, H, N, D)``, exact in `dtype`, with numbers as options.

    Attributes
    ----------
    q, k, v, grad_out, grad_lse : ndarray
    dtype : str
    method : method object
    slopes : None or tuple
        Under a decay they become an array of the backend's kind, exact in the accumulation dtype,
        unless `plain_slopes`.
    causal, scale, q_offset, k_offset, segment_ids
        As for `plsh.attention`; segment ids in NumPy.
    """

    q: Array
    k: Array
    v: Array
    grad_out: Array
    grad_lse: Array | None
    dtype: str
    method: Any
    slopes: Any
    causal: bool = False
    scale: float | None = None
    q_offset: Any = 0
    k_offset: Any = 0
    segment_ids: Any = None
    plain_slopes: bool = False

    def but(self, **changes: Any) -> "Problem":
        """Return the same with other fields."""
        return dataclasses.replace(self, **changes)

    def cut(self, queries: slice = slice(None), keys: slice = slice(None)) -> "Problem":
        """Return the part with some of the queries and keys, at their own positions."""
        ids = self.segment_ids
        if ids is not None:
            of_q, of_k = ids if isinstance(ids, tuple) else (ids, ids)
            ids = (of_q[:, queries], of_k[:, keys])
        return self.but(
            q=self.q[:, :, queries],
            k=self.k[:, :, keys],
            v=self.v[:, :, keys],
            grad_out=self.grad_out[:, :, queries],
            grad_lse=None if self.grad_lse is None else self.grad_lse[:, :, queries],
            q_offset=_moved(self.q_offset, queries.start or 0),
            k_offset=_moved(self.k_offset, keys.start or 0),
            segment_ids=ids,
        )

    def row(self, b: int) -> "Problem":
        """Return batch row `b` alone."""

        def own(x: Any) -> Any:
            return x[b : b + 1] if isinstance(x, np.ndarray) else x

        ids = self.segment_ids
        offsets = [x[b] if isinstance(x, tuple) else x for x in (self.q_offset, self.k_offset)]
        slopes = self.slopes
        return self.but(
            **{name: own(getattr(self, name)) for name in ("q", "k", "v", "grad_out", "grad_lse")},
            q_offset=offsets[0],
            k_offset=offsets[1],
            segment_ids=tuple(map(own, ids)) if isinstance(ids, tuple) else own(ids),
            slopes=slopes[b : b + 1] if slopes and isinstance(slopes[0], tuple) else slopes,
        )

    def arrays(self, subject: Subject) -> tuple[Any, Any, Any]:
        """Make q, k and v of the backend's kind."""
        q, k, v = (subject.array(np.array(x), self.dtype) for x in (self.q, self.k, self.v))
        return q, k, v

    def cotangents(self, subject: Subject) -> tuple[Any, Any]:
        """Make grad_out and grad_lse of the backend's kind."""
        by_lse = self.grad_lse
        return subject.array(self.grad_out, self.dtype), (
            None if by_lse is None else subject.array(by_lse, wide(self.dtype))
        )

    def keywords(self, subject: Subject) -> dict[str, Any]:
        """Make the keywords of the call."""
        ids, slopes = self.segment_ids, self.slopes
        if isinstance(ids, tuple):
            ids = tuple(subject.array(x, str(x.dtype)) for x in ids)
        elif ids is not None:
            ids = subject.array(ids, str(ids.dtype))
        if self.is_decay and slopes is not None and not self.plain_slopes:
            slopes = subject.array(np.array(slopes), wide(self.dtype))
        return {
            "method": self.method,
            "slopes": slopes,
            "causal": self.causal,
            "scale": self.scale,
            "q_offset": self.q_offset,
            "k_offset": self.k_offset,
            "segment_ids": ids,
        }

    def output(self, subject: Subject) -> AttentionOutput:
        """Call the backend; the output comes to NumPy."""
        found = subject.attention(*self.arrays(subject), return_lse=True, **self.keywords(subject))
        return AttentionOutput(*map(subject.host, found))

    def gradients(self, subject: Subject) -> Gradients:
        """Return the gradients, in NumPy."""
        _, found = subject.gradients(
            *self.arrays(subject), *self.cotangents(subject), **self.keywords(subject)
        )
        return Gradients(*(x if x is None else subject.host(x) for x in found))

    def check(self, subject: Subject) -> None:
        """Compare output, lse, and gradients where there are any, with the oracle."""
        expected, plain = self.yardsticks
        inputs, keywords = self.arrays(subject), self.keywords(subject)
        if not subject.differentiates:
            output = subject.attention(*inputs, return_lse=True, **keywords)
            subject.record(*testing.assert_output_close(output, expected, plain, like=inputs[0]))
            return
        output, grads = subject.gradients(*inputs, *self.cotangents(subject), **keywords)
        subject.record(*testing.assert_output_close(output, expected, plain, like=inputs[0]))
        subject.record(
            *testing.assert_gradients_close(grads, expected, plain, like=inputs[0], from_lse=True)
        )

    def check_output(self, subject: Subject) -> None:
        """Compare output and lse with the oracle."""
        q, k, v = self.arrays(subject)
        output = subject.attention(q, k, v, return_lse=True, **self.keywords(subject))
        subject.record(*testing.assert_output_close(output, *self.yardsticks, like=q))

    @property
    def is_decay(self) -> bool:
        """Whether the weight is a decay, which has slopes."""
        return isinstance(self.method, Exact | Window)

    @cached_property
    def yardsticks(self) -> tuple[testing.OracleResult, testing.PlainResult]:
        """Oracle and plain computation."""
        call: dict[str, Any] = {
            **self._weight(),
            "causal": self.causal,
            "scale": self.scale,
            "q_offset": self.q_offset,
            "k_offset": self.k_offset,
            "segment_ids": self.segment_ids,
            "grad_out": self.grad_out,
            "grad_lse": self.grad_lse,
        }
        inputs = self.q, self.k, self.v
        with np.errstate(all="ignore"):  # hidden pairs may overflow
            return testing.oracle(*inputs, **call), testing.plain_attention(
                *inputs, dtype=self.dtype, **call
            )

    def _weight(self) -> dict[str, Any]:
        heads = self.q.shape[1]
        if isinstance(self.method, Exact):
            return {"slopes": self.slopes}
        if isinstance(self.method, Window):
            widths = self.method.width
            if self.method.tol is not None:
                flattest = np.min(np.reshape(self.slopes, (-1, heads)), axis=0)
                widths = tuple(window_width(float(m), self.method.tol) for m in flattest)
            return {"slopes": self.slopes, "widths": np.broadcast_to(widths, (heads,))}
        weight = np.zeros((*self.q.shape[:3], self.k.shape[2]))
        for b in range(self.q.shape[0]):
            of_row = self.row(b)
            weight[b] = testing.step_weight(
                self._labels(of_row.q_offset, self.q.shape[2]),
                self._labels(of_row.k_offset, self.k.shape[2]),
            )
        return {"weight": weight}

    def _labels(self, first: int, n: int) -> Array:
        """Return the labels of n positions; padding below 0 has those of position 0."""
        if isinstance(self.method, PartitionSet):
            return np.asarray(self.method.labels_at(first, first + n))
        lsh = self.method
        family = lsh.family or RandomBinning(tuple(1 / m if m else math.inf for m in self.slopes))
        at = np.maximum(first + np.arange(n), 0)
        start = int(at.min(initial=first if first > 0 else 0))
        sampler = lsh.sampler if family.has_samplers else None
        held = family.sample(
            lsh.samples,
            int(at.max(initial=start)) + 1 - start,
            start=start,
            seed=lsh.seed,
            sampler=sampler,
            head_ids=lsh.head_ids,
        )
        return np.asarray(held.labels()[..., at - start])


def _moved(offset: Any, by: int) -> Any:
    return tuple(x + by for x in offset) if isinstance(offset, tuple) else offset + by


def make(
    subject: Subject,
    len_q: int,
    len_k: int | None = None,
    *,
    method: str = "exact",
    dtype: str | None = None,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    dims: tuple[int, int] = (8, 6),
    seed: int = 0,
    **options: Any,
) -> Problem:
    """Return a problem with drawn arrays; `method` is one of `NAMES`, options are fields."""
    dtype = dtype_of(subject) if dtype is None else dtype
    drawn = testing.make_inputs(batch, heads, kv_heads, len_q, len_k, *dims, dtype, seed)
    return Problem(*drawn, dtype, **{**method_of(method), **options})


def join(parts: list[AttentionOutput]) -> AttentionOutput:
    """Concatenate outputs along the queries."""
    return AttentionOutput(
        np.concatenate([part.out for part in parts], axis=2),
        np.concatenate([part.lse for part in parts], axis=2),
    )


def rows(output: AttentionOutput, part: slice) -> AttentionOutput:
    """Return some of the queries of an output."""
    return AttentionOutput(output.out[:, :, part], output.lse[:, :, part])


def assert_same(
    subject: Subject, dtype: str, actual: tuple[Any, ...], expected: tuple[Any, ...]
) -> None:
    """Assert that outputs or gradients, in NumPy, agree to rounding in the dtype of each."""
    names = ("out", "lse") if len(actual) == 2 else ("dq", "dk", "dv", "dslopes")[: len(actual)]
    for name, x, y in zip(names, actual, expected, strict=True):
        if x is None and y is None:
            continue
        own = wide(dtype) if name in ("lse", "dslopes") else dtype
        made = (subject.array(np.array(a), own) for a in (x, y))
        testing.assert_equal_to_rounding(*made, name=name)


def bits(subject: Subject, actual: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """Assert equal bits on a CPU; elsewhere agreement to rounding (NUM-11)."""
    on_cpu = _is_on_cpu(subject)
    for i, (x, y) in enumerate(zip(actual, expected, strict=True)):
        if x is None and y is None:
            continue
        if on_cpu:
            testing.assert_identical(x, y, name=f"result {i}")
        else:
            testing.assert_equal_to_rounding(x, y, name=f"result {i}")


def _is_on_cpu(subject: Subject) -> bool:
    x = subject.array(np.zeros(1), "float32")
    if subject.kind == "jax":
        return all(device.platform == "cpu" for device in x.devices())
    return "cuda" not in str(getattr(x, "device", "cpu")).lower() and subject.kind != "cupy"
