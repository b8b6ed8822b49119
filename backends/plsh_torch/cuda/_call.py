"""A request turned into launches: tables, temporaries, results. Nothing waits for the device."""

import contextlib
import functools
import inspect
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from plsh.weights import DecayWeight, StepWeight, TableWeight

from .._band import Given as Output
from .._recipe import Given, Recipe, weight_of
from . import _backward, _diagonals, _forward, _tune
from ._available import generation_on, tf32_allowed
from ._plan import Tile, block_of, tile_for
from ._tables import TABLES, capturing

KERNELS = {
    "forward": _forward.forward,
    "by_query": _backward.by_query,
    "by_key": _backward.by_key,
    "diagonals": _diagonals.diagonals,
    "row_terms": _diagonals.row_terms,
}
SCRATCH = 1 << 26
"""Bytes, about, that the counts of diagonal tiles take: heads are launched in as many groups."""
SAMPLES = 64
"""Samples that are counted at once, at most."""
GRID = 2**31 - 1
"""Programs of a launch, at most."""
BAND = 32
"""Rows of a diagonal tile that one program counts, at most."""


class Call:
    """The tensors and plain values of one call."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, given: Given, recipe: Recipe) -> None:
        self.q, self.k, self.v = (x.resolve_neg() for x in (q, k, v))
        self.given, self.recipe = given, recipe
        self.weight = weight_of(q, recipe)
        self.acc = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.dtype = str(q.dtype).rpartition(".")[2]
        self.step = not isinstance(self.weight, DecayWeight)
        self.group = q.shape[1] // max(k.shape[1], 1)
        self.values: dict[str, Any] = {}

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return out ``(B, H, Nq, Dv)`` and lse ``(B, H, Nq)``."""
        q, v = self.q, self.v
        out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=self.acc, device=q.device)
        with _on(q):
            self._prepare(backward=False)
            self._tiled(
                "forward", lambda tile: self._run("forward", tile, queries=True, out=out, lse=lse)
            )
        return out, lse

    def backward(
        self, given: Output, wanted: tuple[bool, bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients that are wanted, by q, k, v and the slopes ``(B, H)``."""
        q, k, v = self.q, self.k, self.v
        given = Output(*(x.resolve_neg() for x in given))
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        by_slope = None
        with _on(q):
            self._prepare(backward=True)
            logs, terms = self._row_terms(given)
            grads: dict[str, Any] = {"grad_out": given.grad_out, "logs": logs, "terms": terms}
            grads |= _strides("do", given.grad_out)

            def by_query(tile: Tile) -> Tensor:
                tiles = -(-q.shape[2] // tile.rows)
                parts = q.new_empty((*q.shape[:2], tiles), dtype=torch.float64)
                self._run("by_query", tile, queries=True, grad_q=dq, by_slope=parts, **grads)
                return parts

            def by_key(tile: Tile) -> None:
                self._run("by_key", tile, queries=False, grad_k=dk, grad_v=dv, **grads)

            if wanted[0] or wanted[3]:
                by_slope = self._tiled("by_query", by_query)
            if wanted[1] or wanted[2]:
                self._tiled("by_key", by_key)
        return (
            dq if wanted[0] else None,
            dk if wanted[1] else None,
            dv if wanted[2] else None,
            by_slope.sum(dim=2) if wanted[3] and by_slope is not None else None,
        )

    # --- what the kernels are given ---

    def _prepare(self, *, backward: bool) -> None:
        """Collect all arguments but those of one kernel."""
        q, k, v, recipe = self.q, self.k, self.v, self.recipe
        for name, x in (("q", q), ("k", k), ("v", v)):
            self.values |= {name: x, **_strides(name, x)}
        for name, ids in (("q_ids", self.given.q_segments), ("k_ids", self.given.k_segments)):
            strides = (0, 0) if ids is None else ids.stride()
            self.values |= {name: ids, f"{name}_b": strides[0], f"{name}_n": strides[1]}
        for name in ("q", "k"):
            self._offset(name)
        # A factor below 1 goes onto q, as far as it is a power of 2, so that products don't leave
        # the range; those of float16 can't.
        scale, factor = recipe.scale, 1.0
        if 0 < abs(scale) < 1 and self.dtype != "float16":
            factor = math.ldexp(1.0, math.frexp(abs(scale))[1])
        # Sums of weights times values stay within the range of the values: those of float16 in
        # its own, by at most `samples`, all others in that of the sums.
        samples = getattr(self.weight, "samples", 1)
        most = samples if self.dtype == "float16" else samples * max(k.shape[2], 1)
        precision = self._precision()
        unit = math.ldexp(1.0, -(most - 1).bit_length())
        self.values |= {
            "batch": q.shape[0],
            "heads": q.shape[1],
            "group": self.group,
            "len_q": q.shape[2],
            "len_k": k.shape[2],
            "dim": q.shape[3],
            "value_dim": v.shape[3],
            "samples": samples,
            "factor": _bits(factor),
            "after": _bits(scale / factor),
            "scale": _bits(scale),
            "unit": _bits(unit),
            "mean": _bits(1 / (unit * samples)),
            "normaliser": _bits(math.log(samples)),
            "DIM": block_of(q.shape[3]),
            "VALUE_DIM": block_of(v.shape[3]),
            "CAUSAL": recipe.causal,
            "STEP": self.step,
            "SEGMENTED": self.given.q_segments is not None,
            "SAMPLES": max(16, 1 << (min(samples, SAMPLES) - 1).bit_length()),
            "CHUNKED": samples > SAMPLES,
            "PRECISION": precision,
            # Where products are made without tensor cores, so are those of the counts.
            "COUNTED": tl.float32
            if self.dtype == "float32" and precision == "ieee"
            else tl.float16,
            "APART": self.dtype in ("float32", "float64"),
            "FACTORED": factor != 1.0,
            "SPREAD": unit != 1.0,
            "DEAD": not self._sees_itself(),
            "ACC": tl.float64 if self.acc == torch.float64 else tl.float32,
        }
        self._weigh(backward)

    def _sees_itself(self) -> bool:
        """Whether every query is known to see a key: the one at its own position."""
        starts = ["q_start", "k_start", "q_offsets", "k_offsets"]
        q_start, k_start, *varied = (self.values[x] for x in starts)
        return (
            varied == [None, None]
            and q_start == k_start
            and self.q.shape[2] == self.k.shape[2]
            and self.given.q_segments is None
        )

    def _precision(self) -> str:
        """Return how products are made: those of float32 as torch's own are."""
        if self.dtype == "float32":
            return "tf32" if tf32_allowed() else "ieee"
        return "ieee" if self.dtype == "float64" else "tf32"

    def _offset(self, name: str) -> None:
        """Give a side's position: a number, or one per batch row on the device."""
        offset = getattr(self.given, f"{name}_offset")
        numbers = getattr(self.recipe, f"{name}_offset")
        start = 0
        if offset is None and len(set(numbers)) <= 1:
            start = numbers[0] if numbers else 0
        elif offset is None:
            key = tuple(numbers)
            offset = TABLES.get(self.q.device, key, lambda: np.array(key, dtype=np.int64))
        rows = 0 if offset is None or offset.numel() == 1 else offset.stride(0)
        if offset is not None and offset.numel() == 0:
            offset = None
        self.values |= {f"{name}_offsets": offset, f"{name}_offsets_b": rows}
        self.values[f"{name}_start"] = start

    def _weigh(self, backward: bool) -> None:
        """Give the weight: slopes and bandwidths, or what makes the blocks."""
        tables = ("slopes", "bandwidths", "width", "shift", "labels")
        numbers = ("slopes_b", "slopes_h", "label_head", "label_sample", "label_start",
                   "label_count", "label_steps")  # fmt: skip
        self.values |= dict.fromkeys(tables) | dict.fromkeys(numbers, 0)
        weight = self.weight
        self.bandwidths = weight.bandwidths
        if isinstance(weight, DecayWeight):
            self._slopes()
            self.values["bandwidths"] = self._table(
                weight.bandwidths, lambda: np.array(weight.bandwidths, dtype=np.int32)
            )
        elif isinstance(weight, TableWeight):
            labels = self.given.labels
            if labels is None or labels.numel() == 0:  # then no token is visible
                self._labels(torch.zeros((1, weight.samples, 1), dtype=torch.int32), 0, 1)
            else:
                self._labels(labels, weight.start, weight.stop)
        else:
            self._blocks(weight, backward)

    def _table(self, key: Any, make: Any) -> Tensor:
        return TABLES.get(self.q.device, key, make)

    def _slopes(self) -> None:
        slopes, heads = self.given.slopes, self.q.shape[1]
        if slopes is None:
            host, wide = tuple(self.recipe.slopes), max(heads, 1)
            slopes = self._table(("slopes", host), lambda: np.array(host).reshape(-1, wide))
        strides = (0, 0)
        if slopes.numel():
            strides = (slopes.stride(0) if slopes.ndim == 2 and len(slopes) > 1 else 0,
                       slopes.stride(-1))  # fmt: skip
        self.values |= {"slopes": slopes, "slopes_b": strides[0], "slopes_h": strides[1]}

    def _blocks(self, weight: StepWeight, backward: bool) -> None:
        drawn = weight.bins
        if drawn is None:
            start, stop = self._positions(backward)
            labels = self._table((weight, start, stop), lambda: weight.labels(start, stop))
            self._labels(labels, start, stop)
            return
        self.values["width"] = self._table(("width", weight), lambda: drawn[0])
        self.values["shift"] = self._table(("shift", weight), lambda: drawn[1])

    def _labels(self, labels: Tensor, start: int, stop: int) -> None:
        labels = labels.to(self.q.device, torch.int32).contiguous()
        self.values |= {
            "labels": labels,
            "label_head": labels.stride(0) if len(labels) > 1 else 0,
            "label_sample": labels.stride(1),
            "label_start": start,
            "label_count": stop - start,
            "label_steps": (stop - start).bit_length(),
        }

    def _positions(self, backward: bool) -> tuple[int, int]:
        """Return the range of positions whose blocks a table of labels must hold.

        The owned positions are looked up, and where their blocks end as far as tokens go: forward
        and causal, none beyond the last query matters.
        """
        spans = []
        for name, x in (("q", self.q), ("k", self.k)):
            offsets = self._read(name)
            if offsets and x.shape[2]:
                spans.append((min(offsets), max(offsets) + x.shape[2]))
        if self.recipe.causal and not backward:
            spans = spans[:1]
        start = max(min((low for low, _ in spans), default=0), 0)
        return start, max([high for _, high in spans] + [start + 1])

    def _read(self, name: str) -> list[int]:
        """Return the positions of a side's token 0, in every batch row."""
        offset: Tensor | None = getattr(self.given, f"{name}_offset")
        if offset is None:
            return list(getattr(self.recipe, f"{name}_offset"))
        if capturing(offset.device):
            raise RuntimeError(
                "q_offset and k_offset must be numbers while a graph is captured, for a family "
                f"without equal widths such as {self.recipe.family}: its blocks are made on the "
                "host for the positions of the call"
            )
        return [int(x) for x in offset.reshape(-1).tolist()]

    # --- launches ---

    def _tiled(self, kernel: str, run: Callable[[Tile], Any]) -> Any:
        """Run with the tile of the frozen table, or where it is asked for with the fastest."""
        dim = max(self.q.shape[3], self.v.shape[3])
        segments = self.given.q_segments is not None
        kind = (kernel, self.dtype, self.step, segments, dim, generation_on(self.q.device))
        if _tune.wanted() and not capturing(self.q.device):
            key = (*kind, self.q.device, self.recipe.causal, self.q.shape, self.k.shape)
            return run(_tune.fastest(key, _tune.candidates(*kind), run))
        return run(tile_for(*kind))

    def _row_terms(self, given: Output) -> tuple[Tensor, Tensor]:
        """Return of each row the lse in units of log2, and ``rowsum(dO * O) - dlse``."""
        logs, terms = (
            torch.empty(given.lse.shape, dtype=self.acc, device=self.q.device) for _ in range(2)
        )
        rows = max(1, 4096 // self.values["VALUE_DIM"])
        self._launch(
            "row_terms",
            -(-terms.numel() // rows),
            Tile(rows, 0, 4, 1),
            out=given.out.contiguous(),
            lse=given.lse.contiguous(),
            grad_lse=given.grad_lse.contiguous(),
            logs=logs,
            terms=terms,
            every_row=terms.numel(),
            grad_out=given.grad_out,
            **_strides("do", given.grad_out),
        )
        return logs, terms

    def _run(self, kernel: str, tile: Tile, *, queries: bool, **own: Any) -> None:
        """Launch a kernel for all that it owns, the heads of the longest bands first."""
        owned = self.q if queries else self.k
        batch, heads, length = owned.shape[:3]
        members = 1 if queries else self.group
        tiles = -(-length // tile.rows)
        if not batch * heads * tiles:
            return
        widths = [max(self.bandwidths[h * members : (h + 1) * members]) for h in range(heads)]
        ranked = sorted(range(heads), key=lambda h: -widths[h])
        order = self._table(("order", *ranked), lambda: np.array(ranked, dtype=np.int32))
        each = max(1, GRID // (batch * tiles))
        counts = None
        if self.step:
            wide = torch.uint8 if self.values["samples"] < 256 else torch.int32
            varied = self.values[f"{'q' if queries else 'k'}_offsets_b"] != 0
            layers = batch if varied else 1
            size = layers * members * tiles * tile.rows**2
            each = max(1, min(each, SCRATCH // (size * wide.itemsize)))
            counts = torch.empty(min(each, heads) * size, dtype=wide, device=self.q.device)
        for first in range(0, heads, each):
            here = min(each, heads - first)
            if counts is not None:
                size = here * members * tiles * tile.rows**2
                self._count_diagonals(counts, ranked, first, here, layers, tiles, tile, queries)
                own |= {"diagonals": counts, "diagonals_b": size if varied else 0}
            else:
                own |= {"diagonals": None, "diagonals_b": 0}
            own |= {"order": order, "first_rank": first, "tiles": tiles}
            self._launch(kernel, batch * here * tiles, tile, **own)

    def _count_diagonals(
        self, counts: Tensor, ranked: list[int], first: int, heads: int, layers: int, tiles: int,
        tile: Tile, queries: bool,
    ) -> None:  # fmt: skip
        """Count the shared blocks of the diagonal tiles of some heads."""
        members = 1 if queries else self.group
        every = [h * members + m for h in ranked for m in range(members)]
        order = self._table(("order", *every), lambda: np.array(every, dtype=np.int32))
        side, causal = "q" if queries else "k", self.recipe.causal
        band = min(BAND, tile.rows)
        self._launch(
            "diagonals",
            heads * members * layers * tiles * (tile.rows // band),
            tile._replace(warps=4, stages=1),
            counts=counts,
            offsets=self.values[f"{side}_offsets"],
            offsets_b=self.values[f"{side}_offsets_b"],
            start=self.values[f"{side}_start"],
            order=order,
            counts_b=heads * members * tiles * tile.rows**2,
            first_rank=first * members,
            tiles=tiles,
            batch=layers,
            BAND=band,
            LOWER=not causal or queries,
            UPPER=not causal or not queries,
        )  # fmt: skip

    def _launch(self, kernel: str, grid: int, tile: Tile, **own: Any) -> None:
        if not grid:
            return
        values = {**self.values, "ROWS": tile.rows, "COLUMNS": tile.columns, **own}
        KERNELS[kernel][(grid,)](
            **{name: values[name] for name in arguments(kernel)},
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def _on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make a tensor's device the current one: kernels are launched there."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _strides(name: str, x: Tensor) -> dict[str, int]:
    return {f"{name}_{a}": stride for a, stride in zip("bhnd", x.stride(), strict=True)}


@functools.cache
def arguments(kernel: str) -> tuple[str, ...]:
    """Return the names of a kernel's arguments, in their order."""
    return tuple(inspect.signature(KERNELS[kernel].fn).parameters)


def _bits(x: float) -> int:
    """Return a double as an integer: as a number it would reach a kernel as a float."""
    found: int = struct.unpack("<q", struct.pack("<d", x))[0]
    return found
