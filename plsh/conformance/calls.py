"""A call of attention described by a few words, with its yardsticks.

`Call` names the options, `check_call` makes the arrays, calls the backend and compares output, lse
and gradients with the float64 oracle, and `pairwise` covers all pairs of options with few calls.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import testing
from ..hashing import Family, FixedBlocks, IndependentCuts, PowerLawBinning, RandomBinning
from ..methods import Exact, PositionalLSH, Window
from ..partition import PartitionSet
from .subject import Subject

__all__ = ["FACTORS", "FAR", "SEED", "Call", "check_call", "method_name", "pairwise"]

SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}
SEED = (3, 1)
FAR = 2**29
"""A position at which float32 no longer tells neighbours apart."""

FACTORS: dict[str, list[Any]] = {
    "method": [
        "exact", "window", "windows", "tol", "lsh", "lsh-iid", "set", "set1", "cuts", "blocks",
        "power",
    ],
    "lengths": [(n, n) for n in (0, 1, 31, 32, 33, 63, 64, 65, 127, 129)]
    + [(33, 65), (65, 31), (1, 129), (5, 2), (4, 0), (0, 4)],
    "heads": [(1, 1), (4, 2), (6, 2), (3, 1)],
    "dims": [(1, 1), (3, 64), (64, 3), (16, 16), (80, 80)],
    "batch": [None, 0, 1, 3],
    "causal": [False, True],
    "scale": [None, 0.0, -0.7],
    "offsets": ["none", "both", "cache", "batch", "far"],
    "segments": ["none", "one", "pair"],
    "layout": ["bhsd", "bshd"],
    "return_lse": [False, True],
    "slope_form": ["heads", "rows", "one"],
    "dtype": ["float16", "bfloat16", "float32", "float64"],
    "samples": [1, 5],
}  # fmt: skip
"""The options of a call; tests have a row for every pair of their values."""

Array = npt.NDArray[Any]


def method_name(word: str) -> str:
    """Return the method that a word of `Call.method` stands for: exact, window or lsh."""
    if word in ("window", "windows", "tol"):
        return "window"
    return "exact" if word == "exact" else "lsh"


@dataclass(frozen=True)
class Call:
    """One call; each field is a word of the test's id.

    Attributes
    ----------
    method : str
        exact, window, windows (one width per head), tol, lsh, lsh-iid, set (a PartitionSet), set1
        (one of one head), cuts, blocks, power.
    heads, lengths, dims : tuple of int
        (H, Hkv), (Nq, Nk), (D, Dv).
    offsets : str
        none, both (two numbers), cache (queries at the end of the keys), batch (one per batch row),
        far (beyond float32's integers).
    segments : str
        none, one, pair.
    slope_form : str
        heads (H,), rows (B, H), one (0-d); the last two under a decay.
    flatter : float
        Divides the slopes, so that the weights reach across tiles.
    """

    method: str = "exact"
    heads: tuple[int, int] = (4, 2)
    lengths: tuple[int, int] = (33, 33)
    dims: tuple[int, int] = (16, 16)
    batch: int | None = 2
    causal: bool = False
    scale: float | None = None
    offsets: str = "none"
    segments: str = "none"
    layout: str = "bhsd"
    return_lse: bool = True
    dtype: str = "float64"
    samples: int = 5
    slope_form: str = "heads"
    flatter: float = 1.0

    def __str__(self) -> str:
        (heads, kv_heads), (len_q, len_k), (dim, value_dim) = self.heads, self.lengths, self.dims
        words = [
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
        words += [] if self.slope_form == "heads" else [f"m_{self.slope_form}"]
        words += [] if self.flatter == 1 else [f"flat{self.flatter:g}"]
        return "-".join(words)

    @property
    def needs(self) -> tuple[str, ...]:
        """What a backend must declare to serve it."""
        method = f"method:{method_name(self.method)}"
        return method, f"dtype:{self.dtype}", f"head dim:{max(self.dims)}"

    @property
    def may_be_refused(self) -> bool:
        """Whether a backend may decline it though it declares all that it needs (BCK-14)."""
        return self.offsets == "batch" or self.method.startswith("set")

    @property
    def rows(self) -> int:
        """Batch rows."""
        return 1 if self.batch is None else self.batch

    @property
    def is_decay(self) -> bool:
        """Whether the weight is a decay, which has slopes."""
        return method_name(self.method) != "lsh"

    @cached_property
    def inputs(self) -> testing.AttentionInputs:
        """The inputs, ``(B, H, N, D)``, in NumPy."""
        seed = sum(self.lengths) * 1000 + self.dims[0]
        shape = (self.rows, *self.heads, *self.lengths, *self.dims)
        return testing.make_inputs(*shape, self.dtype, seed)

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
        first = FAR if self.offsets == "far" else 0
        if self.offsets == "cache" or len_q != len_k:
            first += 3 + max(0, len_q - len_k)
            return first + len_k - len_q, first
        return first, first

    @cached_property
    def segment_ids(self) -> Any:
        """Runs of equal ids with padding between; a pair where the lengths differ."""
        if self.segments == "none":
            return None
        rng = np.random.default_rng(7)

        def ids(length: int) -> Array:
            runs = np.cumsum(rng.random((self.rows, length)) < 4 / max(length, 1), axis=1)
            return np.where(rng.random(runs.shape) < 0.1, -1, runs).astype(np.int32)

        len_q, len_k = self.lengths
        if self.segments == "one" and len_q == len_k:
            return ids(len_q)
        return ids(len_q), ids(len_k)

    @cached_property
    def slopes(self) -> tuple[Any, ...]:
        """Steep to flat; the last of several is 0. One per head, or a row of them per batch row."""
        heads = self.heads[0]
        steps = tuple(float(np.float32(0.5 * 0.4**h / self.flatter)) for h in range(heads))
        steps = (*steps[:-1], 0.0) if heads > 2 else steps
        if self.is_decay and self.slope_form == "one":
            return steps[:1] * heads
        if self.is_decay and self.slope_form == "rows" and self.batch:
            return tuple(tuple(m * (b + 1) / 2 for m in steps) for b in range(self.batch))
        return steps

    @cached_property
    def widths(self) -> Any:
        """The width or widths of a window."""
        if self.method == "window":
            return 7
        return tuple((20, 0, 3, 200)[h % 4] for h in range(self.heads[0]))

    @cached_property
    def family(self) -> Family:
        """What lsh draws from."""
        heads = range(self.heads[0])
        if self.method == "cuts":
            return IndependentCuts(tuple(1.5 + 9.0 * h for h in heads))
        if self.method == "blocks":
            return FixedBlocks(tuple(1.0 + 11.3 * h for h in heads))
        if self.method == "power":
            return PowerLawBinning(2.0, tuple(0.9 / (1 + 3 * h) for h in heads))
        slopes = self.slopes[:1] if self.method == "set1" else self.slopes
        return RandomBinning(tuple(1 / m if m else float("inf") for m in slopes))

    @property
    def sampler(self) -> str | None:
        """The sampler that lsh names."""
        if not self.family.has_samplers:
            return None
        return "iid" if self.method == "lsh-iid" else "stratified"

    @cached_property
    def partitions(self) -> PartitionSet:
        """The blocks that lsh must see, of all positions that occur."""
        start = FAR if self.offsets == "far" else 0
        ends = [
            max(np.atleast_1d(first).max(initial=0), 0) + n
            for first, n in zip(self.positions, self.lengths, strict=True)
        ]
        length = max(int(max(ends)) - start, 0)
        return self.family.sample(
            self.samples, length, start=start, seed=SEED, sampler=self.sampler
        )

    @cached_property
    def weight(self) -> dict[str, Any]:
        """What the oracle is told of the positional weight."""
        heads = self.heads[0]
        if self.method == "exact":
            return {"slopes": self.slopes}
        if self.method == "tol":
            flattest = np.min(np.reshape(self.slopes, (-1, heads)), axis=0)
            widths = [np.ceil(np.log(100) / m) if m else 1e9 for m in flattest]
            return {"slopes": self.slopes, "widths": np.array(widths, dtype=int)}
        if self.is_decay:
            return {"slopes": self.slopes, "widths": np.broadcast_to(self.widths, (heads,))}
        labels, start = self.partitions.labels(), self.partitions.start
        at = [
            np.broadcast_to(np.asarray(first, dtype=int), (self.rows,))[:, None] + np.arange(n)
            for first, n in zip(self.positions, self.lengths, strict=True)
        ]
        weight = np.zeros((self.rows, heads, *self.lengths))
        for b in range(self.rows):
            own = (labels[..., np.maximum(x[b] - start, 0)] for x in at)
            weight[b] = testing.step_weight(*own)
        return {"weight": weight}

    @cached_property
    def yardsticks(self) -> tuple[testing.OracleResult, testing.PlainResult]:
        """Oracle and plain computation, in the caller's layout."""
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
        expected = testing.oracle(*inputs[:3], **call)
        plain = testing.plain_attention(*inputs[:3], dtype=self.dtype, **call)
        return self._arranged(expected), self._arranged(plain)

    def _arranged(self, result: Any) -> Any:
        one = self.is_decay and self.slope_form == "one"
        return result._replace(
            lse=result.lse if self.batch is not None else result.lse[0],
            slopes=result.slopes.sum() if one else result.slopes,
            **{name: self.arrange(getattr(result, name)) for name in ("out", "q", "k", "v")},
        )

    def arrange(self, x: Array) -> Array:
        """Give a ``(B, H, N, D)`` array the caller's layout."""
        x = x if self.batch is not None else x[0]
        return x.swapaxes(-3, -2) if self.layout == "bshd" else x

    def method_object(self) -> Any:
        """Return what is given as `method`."""
        if self.method == "exact":
            return Exact()
        if self.method == "tol":
            return Window(tol=1e-2)
        if self.is_decay:
            return Window(self.widths)
        if self.method in ("set", "set1"):
            return self.partitions
        family = None if self.method in ("lsh", "lsh-iid") else self.family
        return PositionalLSH(self.samples, sampler=self.sampler, seed=SEED, family=family)

    def arrays(self, subject: Subject) -> list[Any]:
        """Make q, k, v, grad_out and grad_lse, in the caller's layout."""
        *full, grad_lse = self.inputs
        found = [subject.array(self.arrange(x), self.dtype) for x in full]
        wide = "float64" if self.dtype == "float64" else "float32"
        rows = grad_lse if self.batch is not None else grad_lse[0]
        return [*found, subject.array(rows, wide)]

    def keywords(self, subject: Subject) -> dict[str, Any]:
        """Make the keywords of the call; arrays are of the backend's kind where they may be."""
        ids = self.segment_ids
        if ids is not None:
            pair = tuple(
                subject.array(x if self.batch is not None else x[0], "int32")
                for x in (ids if isinstance(ids, tuple) else (ids,))
            )
            ids = pair if len(pair) == 2 else pair[0]
        q_offset, k_offset = self.positions
        if isinstance(q_offset, tuple):
            q_offset = subject.array(np.array(q_offset), "int32")
        elif self.offsets == "none" and self.lengths[0] == self.lengths[1]:
            q_offset = None
        return {
            "method": self.method_object(),
            "slopes": self._slopes_given(subject),
            "causal": self.causal,
            "scale": self.scale,
            "q_offset": q_offset,
            "k_offset": k_offset,
            "segment_ids": ids,
            "layout": self.layout,
        }

    def _slopes_given(self, subject: Subject) -> Any:
        if not self.is_decay:
            return self.slopes if self.method in ("lsh", "lsh-iid") else None
        slopes = np.array(self.slopes[0] if self.slope_form == "one" else self.slopes)
        if self.method == "tol":  # must be concrete wherever gradients are traced
            return slopes
        return subject.array(slopes, "float64" if self.dtype == "float64" else "float32")


def check_call(call: Call, subject: Subject) -> None:
    """Output, lse, and gradients where the backend has them, against the oracle."""
    expected, plain = call.yardsticks
    q, k, v, grad_out, grad_lse = call.arrays(subject)
    keywords = call.keywords(subject)
    output = subject.attention(q, k, v, return_lse=True, **keywords)
    subject.record(*testing.assert_output_close(output, expected, plain, like=q))
    if not call.return_lse:  # asked for or not, the lse never changes the output
        testing.assert_identical(subject.attention(q, k, v, **keywords), output.out)
    if not subject.differentiates:
        return
    cotangents = (grad_out, grad_lse if call.return_lse else None)
    _, grads = subject.gradients(q, k, v, *cotangents, **keywords)
    if subject.capabilities.gradients == "vjp":
        _check_slopes(grads.slopes, call)
    measured = testing.assert_gradients_close(grads, expected, plain, like=q, from_lse=True)
    subject.record(*measured)


def _check_slopes(gradient: Any, call: Call) -> None:
    if (gradient is None) == call.is_decay:
        raise AssertionError(f"gradient by slopes under {call.method}: got {gradient!r}")


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield rows of options such that every pair of values of two factors is in one of them.

    Examples
    --------
    >>> len(list(pairwise({"a": [1, 2], "b": [1, 2], "c": [1, 2]})))
    4
    """
    rng = random.Random(seed)  # noqa: S311 — a choice of tests
    names = list(factors)
    missing = {
        frozenset(((a, i), (b, j)))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    while missing:
        best: tuple[int, dict[str, int]] = (-1, {})
        for pair in rng.sample(sorted(missing, key=sorted), min(4, len(missing))):
            row = dict(pair)
            for name in rng.sample(names, len(names)):
                if name not in row:
                    gains = [
                        sum(frozenset(((name, i), item)) in missing for item in row.items())
                        for i in range(len(factors[name]))
                    ]
                    top = max(gains)
                    row[name] = rng.choice([i for i, gain in enumerate(gains) if gain == top])
            gain = sum(frozenset(p) in missing for p in itertools.combinations(row.items(), 2))
            best = max(best, (gain, row), key=lambda found: found[0])
        row = best[1]
        missing -= {frozenset(p) for p in itertools.combinations(row.items(), 2)}
        yield {name: factors[name][row[name]] for name in names}
