"""Faults of heads, tiles, precision, masks and options."""

from dataclasses import replace
from typing import Any

import numpy as np

from plsh.backend import Request, Static
from plsh.testing.model import Head, ModelBackend, Softmax
from plsh.weights import UNLIMITED, DecayWeight

from ._mutant import Mutant, changed, collector

MUTANTS: list[Mutant] = []
mutant = collector(MUTANTS)

# --- heads ----------------------------------------------------------------------------------------


@mutant("heads", "ATT-4")
class HeadsInterleaved(ModelBackend):
    """Query head h reads key head h modulo the number of key heads."""

    def kv_head(self, h: int, static: Static) -> int:
        return h % static.kv_heads


@mutant("heads", "ATT-4")
class FirstKeyHeads(ModelBackend):
    """Query head h reads key head h, and the last one where there is none."""

    def kv_head(self, h: int, static: Static) -> int:
        return min(h, static.kv_heads - 1)


@mutant("heads", "NUM-12")
class ShiftOfTheBatch(ModelBackend):
    """The shift bounds the scores of the whole batch, and nothing checks the sum."""

    def head(self, place: Any, arrays: Any, request: Request, buffers: Any) -> Head:
        if not buffers:
            norms = [np.linalg.norm(x.astype(np.float32), axis=-1) for x in arrays[:2]]
            largest = [x[np.isfinite(x)].max(initial=0) for x in norms]
            buffers["bound"] = abs(request.static.scale) * largest[0] * largest[1]
        return super().head(place, arrays, request, buffers)

    def fold(self, head: Head, state: Softmax, scores: Any, v: Any) -> Softmax:
        top = np.maximum(state.top, head.acc.type(head.buffers["bound"]))
        return super().fold(head, state._replace(top=top), scores, v)


# --- tiles ----------------------------------------------------------------------------------------


@mutant("tiles", "MEM-3", "ATT-3")
class TailOfQueriesUnwritten(ModelBackend):
    """The last tile of rows is written only if it is full."""

    def store(self, x: Any, start: int, tile: Any) -> None:
        if start + self.tile <= x.shape[0]:
            super().store(x, start, tile)


@mutant("tiles", "ATT-3")
class TailOfKeysSeen(ModelBackend):
    """The last tile of keys is as full as the others: zeros past the end are keys."""

    def fill(self, x: Any) -> Any:
        filled = super().fill(x)
        filled[..., x.shape[-1] :] = 0
        return filled


@mutant("tiles", "MEM-3")
class LastTileLost(ModelBackend):
    """The number of tiles is (n - 1) / tile, rounded down."""

    def tiles(self, low: int, high: int, n: int) -> range:
        own = super().tiles(low, high, n)
        return range(own.start, own.stop - (own.stop == n and n > self.tile), self.tile)


@mutant("tiles", "MEM-3")
class BandInWholeTiles(ModelBackend):
    """The band reaches back by its width in tiles, rounded down."""

    def key_tiles(self, head: Head, i: int) -> range:
        return super().key_tiles(head._replace(width=head.width // self.tile * self.tile), i)


@mutant("tiles", "MEM-3")
class BandOfTheFirstQuery(ModelBackend):
    """A tile visits the keys in the band of its first query, not of its last."""

    def key_tiles(self, head: Head, i: int) -> range:
        ahead = head.starts[0] + i - head.starts[1]
        after = 0 if head.static.causal else head.width
        return self.tiles(ahead - head.width, ahead + 1 + after, head.k.shape[0])


@mutant("tiles", "MTH-1")
class UnlimitedOverflows(ModelBackend):
    """Position plus bandwidth wraps in int32: an unlimited band ends before it begins."""

    def tiles(self, low: int, high: int, n: int) -> range:
        return super().tiles(low, (high + 2**31) % 2**32 - 2**31, n)


@mutant("tiles", "ATT-3")
class NoKeysCrash(ModelBackend):
    """A call without keys divides by their number."""

    def groups(self, arrays: Any, request: Request) -> Any:
        if arrays[0].shape[2] // arrays[1].shape[2] >= 0:
            yield from super().groups(arrays, request)


@mutant("tiles", "ATT-3")
class ValuesAsWideAsKeys(ModelBackend):
    """Tiles of values have D columns; the columns of v past them are not read."""

    def load_values(self, head: Head, j: int) -> Any:
        v = super().load_values(head, j)
        v[:, head.q.shape[1] :] = 0
        return v


# --- precision ------------------------------------------------------------------------------------


@mutant("precision", "NUM-1")
class LogitsInHalf(ModelBackend):
    """Logits are rounded to the input dtype."""

    def scores(self, head: Head, i: int, j: int, q: Any, k: Any) -> Any:
        return self.narrow(head, super().scores(head, i, j, q, k))


@mutant("precision", "NUM-1")
class SumsInHalf(ModelBackend):
    """The sums of a row are kept in the input dtype."""

    def fold(self, head: Head, state: Softmax, scores: Any, v: Any) -> Softmax:
        folded = super().fold(head, state, scores, v)
        return folded._replace(total=self.narrow(head, folded.total))


@mutant("precision", "NUM-1")
class OutputAddedUpInHalf(ModelBackend):
    """The products of P and v add up in the input dtype."""

    def fold(self, head: Head, state: Softmax, scores: Any, v: Any) -> Softmax:
        folded = super().fold(head, state, scores, v)
        return folded._replace(values=self.narrow(head, folded.values))


@mutant("precision", "NUM-3")
class SlopesInHalf(ModelBackend):
    """Slopes are cast to the dtype of q."""

    def head(self, place: Any, arrays: Any, request: Request, buffers: Any) -> Head:
        own = super().head(place, arrays, request, buffers)
        return own if own.slope is None else own._replace(slope=self.narrow(own, own.slope))


@mutant("precision", "NUM-2")
class DistancesInHalf(ModelBackend):
    """Distances are held in float16, which is exact to 2048."""

    def distance(self, head: Head, i: int, j: int) -> Any:
        return super().distance(head, i, j).astype(np.float16).astype(head.acc)


@mutant("precision", "NUM-5")
class Bfloat16AsFloat16(ModelBackend):
    """bfloat16 goes through float16, which ends at 65504."""

    def load(self, head: Head, name: str, x: Any, ids: Any, start: int) -> Any:
        tile = super().load(head, name, x, ids, start)
        return tile.astype(np.float16).astype(head.acc) if x.dtype.name == "bfloat16" else tile


@mutant("precision", "CNV-3")
class Float64InFloat32(ModelBackend):
    """float64 is computed in float32, and cast at the end."""

    def load(self, head: Head, name: str, x: Any, ids: Any, start: int) -> Any:
        return super().load(head, name, x, ids, start).astype(np.float32).astype(head.acc)


@mutant("precision", "NUM-1")
class ProductsInTf32(ModelBackend):
    """Products of float32 take the upper ten bits of each operand."""

    def scores(self, head: Head, i: int, j: int, q: Any, k: Any) -> Any:
        if head.q.dtype != np.float32:
            return super().scores(head, i, j, q, k)
        rounded = ((x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in (q, k))
        return super().scores(head, i, j, *rounded)


@mutant("precision", "NUM-3")
class HugeSlopesOverflow(ModelBackend):
    """A slope beyond the accumulation dtype is infinite, and times distance 0 NaN."""

    def slope(self, slopes: Any, b: int, h: int, acc: Any) -> Any:
        rows = np.asarray(slopes)
        return (rows[b, h] if rows.ndim == 2 else rows[h]).astype(acc)


@mutant("precision", "NUM-5")
class LargeValuesOverflow(ModelBackend):
    """The sum of P v is not checked: values near the largest number overflow."""

    def attend_tile(self, head: Head, i: int) -> Any:
        state = self.walk(head, i)
        return self.divide(state), self.lse(state)


@mutant("precision", "NUM-5")
class NoShift(ModelBackend):
    """Scores are exponentiated as they are: beyond 88 float32 overflows."""

    def fold(self, head: Head, state: Softmax, scores: Any, v: Any) -> Softmax:
        p = np.exp(scores)
        total = state.total + p.sum(axis=1)
        return Softmax(0 * total, total, state.values + self.narrow(head, p) @ v)


# --- masks ----------------------------------------------------------------------------------------


@mutant("masks", "ATT-19")
class PaddingSeesPadding(ModelBackend):
    """A negative id is an id like any other."""

    def segments(self, pair: Any, side: int, b: int, n: int) -> Any:
        own = np.abs(super().segments(pair, side, b, n))
        own[n:] = -1
        return own


@mutant("masks", "ATT-19")
class IdsOfQueriesForKeys(ModelBackend):
    """The keys have the ids of the queries, as far as these go."""

    def segments(self, pair: Any, side: int, b: int, n: int) -> Any:
        if pair is None or side == 0:
            return super().segments(pair, side, b, n)
        rows = np.concatenate([pair[0], pair[1][:, pair[0].shape[1] :]], axis=1)
        return super().segments((None, rows[:, :n]), side, b, n)


@mutant("masks", "ATT-19")
class IdsInEightBits(ModelBackend):
    """Segment ids are cast to int8."""

    def segments(self, pair: Any, side: int, b: int, n: int) -> Any:
        return super().segments(pair, side, b, n).astype(np.int8)


@mutant("masks", "NUM-12")
class SegmentsOfRow0(ModelBackend):
    """All batch rows have the segments of the first."""

    def segments(self, pair: Any, side: int, b: int, n: int) -> Any:
        return super().segments(pair, side, 0, n)


@mutant("masks", "ATT-20")
class PaddedValuesRead(ModelBackend):
    """What padding holds in v is multiplied by a P of 0: NaN stays NaN."""

    def load_values(self, head: Head, j: int) -> Any:
        ids = np.where(np.arange(head.ids[1].size) < len(head.v), 0, -1)
        return self.load(head, "v", head.v, ids, j)


@mutant("masks", "ATT-20")
class PaddedQueriesRead(ModelBackend):
    """What padding holds in q reaches the gradient by k, times a dS of 0."""

    def load_queries(self, head: Head, i: int) -> Any:
        ids = np.where(np.arange(head.ids[0].size) < len(head.q), 0, -1)
        return super().load_queries(head._replace(ids=(ids, head.ids[1])), i)


@mutant("masks", "ATT-21")
class DeadRowsUnwritten(ModelBackend):
    """A tile of queries without a key returns at once, and leaves what the memory held."""

    def attend_tile(self, head: Head, i: int) -> Any:
        out, lse = super().attend_tile(head, i)
        return out if self.key_tiles(head, i) else out + 7, lse


# --- options --------------------------------------------------------------------------------------


@mutant("options", "ATT-13")
class ScaleIgnored(ModelBackend):
    """The scale is D^-0.5, whatever was asked for."""

    def groups(self, arrays: Any, request: Request) -> Any:
        static = replace(request.static, scale=request.static.head_dim**-0.5)
        return super().groups(arrays, replace(request, static=static))


@mutant("options", "ATT-13")
class RootOfTheScale(ModelBackend):
    """Queries and keys each take the root of the scale, which has no sign."""

    def load_queries(self, head: Head, i: int) -> Any:
        static = replace(head.static, scale=abs(head.static.scale))
        return super().load_queries(head._replace(static=static), i)


@mutant("options", "ATT-12")
class CausalIgnoredUnderLsh(ModelBackend):
    """Blocks are attended to whole, causal or not."""

    def visible(self, head: Head, i: int, j: int) -> Any:
        causal = head.static.causal and head.labels is None
        return super().visible(head._replace(static=replace(head.static, causal=causal)), i, j)


@mutant("options", "ATT-19")
class SegmentsIgnoredUnderLsh(ModelBackend):
    """Under lsh segment ids hide padding, and do not part documents."""

    def groups(self, arrays: Any, request: Request) -> Any:
        pair = request.arrays.segment_ids
        if pair is not None and not isinstance(request.static.weight, DecayWeight):
            request = changed(request, segment_ids=tuple(np.minimum(ids, 0) for ids in pair))
        return super().groups(arrays, request)


@mutant("options", "MTH-2")
class WindowIgnored(ModelBackend):
    """A window is computed as exact."""

    def width(self, static: Static, h: int) -> int:
        return UNLIMITED if isinstance(static.weight, DecayWeight) else super().width(static, h)


@mutant("options", "ATT-9")
class SlopesOfTheFirstHead(ModelBackend):
    """One slope is read, and serves all heads."""

    def slope(self, slopes: Any, b: int, h: int, acc: Any) -> Any:
        return super().slope(slopes, b, 0, acc)
