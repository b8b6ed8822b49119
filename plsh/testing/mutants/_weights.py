"""Faults of positions, blocks, weights and pooling."""

from typing import Any

import numpy as np

from plsh import alibi_slopes
from plsh.backend import AttentionOutput, Request, Static
from plsh.testing.model import Head, ModelBackend, Softmax
from plsh.weights import UNLIMITED, DecayWeight, TableWeight

from ._mutant import Mutant, OneSample, changed, collector

MUTANTS: list[Mutant] = []
mutant = collector(MUTANTS)

# --- positions ------------------------------------------------------------------------------------


@mutant("positions", "ATT-14")
class QueryOffsetIgnored(ModelBackend):
    """The queries' offset is ignored: query 0 is at position 0."""

    def groups(self, arrays: Any, request: Request) -> Any:
        return super().groups(arrays, changed(request, q_offset=0))


@mutant("positions", "ATT-14")
class KeyOffsetInCausalityOnly(ModelBackend):
    """The keys' offset counts for causality; distances and blocks count keys from 0."""

    def distance(self, head: Head, i: int, j: int) -> Any:
        return super().distance(head._replace(starts=(head.starts[0], 0)), i, j)

    def head(self, place: Any, arrays: Any, request: Request, buffers: Any) -> Head:
        own = super().head(place, arrays, request, buffers)
        if own.labels is None:
            return own
        keys = self.labels(request, 0, own.k.shape[0], place[1])
        return own._replace(labels=(own.labels[0], keys))


@mutant("positions", "ATT-14")
class PositionsRestartAtSegments(ModelBackend):
    """Blocks are looked up at positions that start at 0 in every packed document."""

    def head(self, place: Any, arrays: Any, request: Request, buffers: Any) -> Head:
        own = super().head(place, arrays, request, buffers)
        if own.labels is None or request.arrays.segment_ids is None:
            return own
        first, second = map(_restarted, own.labels, own.ids)
        return own._replace(labels=(first, second))


def _restarted(labels: Any, ids: Any) -> Any:
    _, begins, document = np.unique(ids, return_index=True, return_inverse=True)
    return labels[:, np.arange(ids.size) - begins[document]]


@mutant("positions", "ATT-12")
class OwnKeyHidden(ModelBackend):
    """Causality hides the key at the query's own position."""

    def visible(self, head: Head, i: int, j: int) -> Any:
        seen = super().visible(head, i, j)
        return seen & (self.apart(head, i, j) != 0) if head.static.causal else seen


@mutant("positions", "ATT-12")
class NextKeySeen(ModelBackend):
    """Causality lets a query see one key of its future."""

    def visible(self, head: Head, i: int, j: int) -> Any:
        first, second = head.starts
        return super().visible(head._replace(starts=(first + 1, second)), i, j)

    def key_tiles(self, head: Head, i: int) -> range:
        first, second = head.starts
        return super().key_tiles(head._replace(starts=(first + 1, second)), i)


@mutant("positions", "ATT-12")
class CausalTopLeft(ModelBackend):
    """Causality compares indices of queries and keys, not positions."""

    def visible(self, head: Head, i: int, j: int) -> Any:
        return super().visible(head._replace(starts=(0, 0)), i, j)


@mutant("positions", "ATT-12")
class CausalBottomRight(ModelBackend):
    """Causality aligns the last query with the last key, wherever they are."""

    def visible(self, head: Head, i: int, j: int) -> Any:
        return super().visible(head._replace(starts=(len(head.k) - len(head.q), 0)), i, j)


@mutant("positions", "ATT-15")
class OffsetOfRow0(ModelBackend):
    """All batch rows have the offsets of the first."""

    def start(self, offset: Any, b: int) -> int:
        return super().start(offset, 0)


@mutant("positions", "NUM-2")
class BiasOfAbsolutePositions(ModelBackend):
    """The bias is the difference of slope times position, rounded before it is taken."""

    def distance(self, head: Head, i: int, j: int) -> Any:
        q_at, k_at = (self.positions(head, side, at) for side, at in enumerate((i, j)))
        return np.abs(q_at.astype(head.acc)[:, None] - k_at.astype(head.acc)[None, :])


# --- blocks ---------------------------------------------------------------------------------------


@mutant("blocks", "HSH-4")
class BlocksOfTheNeighbour(ModelBackend):
    """A query is in the blocks of the token after it."""

    def head(self, place: Any, arrays: Any, request: Request, buffers: Any) -> Head:
        own = super().head(place, arrays, request, buffers)
        if own.labels is None:
            return own
        queries = self.labels(request, own.starts[0] + 1, own.q.shape[0], place[1])
        return own._replace(labels=(queries, own.labels[1]))


@mutant("blocks", "MTH-6")
class BlocksOfHead0(ModelBackend):
    """All heads share the blocks of head 0."""

    def labels(self, request: Request, start: int, n: int, h: int) -> Any:
        return super().labels(request, start, n, 0)


@mutant("blocks", "CNV-1", "ATT-14")
class BlocksOfTheIndex(ModelBackend):
    """Blocks are looked up by index in the array, not by position."""

    def labels(self, request: Request, start: int, n: int, h: int) -> Any:
        return super().labels(request, 0, n, h)


@mutant("blocks", "ATT-14")
class KeysInTheBlocksOfQueries(ModelBackend):
    """The keys' blocks are looked up from the first query's position on."""

    def head(self, place: Any, arrays: Any, request: Request, buffers: Any) -> Head:
        own = super().head(place, arrays, request, buffers)
        if own.labels is None:
            return own
        keys = self.labels(request, own.starts[0], own.k.shape[0], place[1])
        return own._replace(labels=(own.labels[0], keys))


@mutant("blocks", "MTH-6")
class OneHeadOfBlocksForOneHead(ModelBackend):
    """A PartitionSet of one head serves head 0; the others read past it, and find zeros."""

    def labels(self, request: Request, start: int, n: int, h: int) -> Any:
        own = super().labels(request, start, n, h)
        table = request.arrays.labels
        return own if table is None or h < table.shape[0] else np.zeros_like(own)


@mutant("blocks", "MTH-6")
class StartOfTheTableIgnored(ModelBackend):
    """A PartitionSet's labels are read from position 0 on, wherever they start."""

    def labels(self, request: Request, start: int, n: int, h: int) -> Any:
        weight = request.static.weight
        shift = weight.start if isinstance(weight, TableWeight) else 0
        return super().labels(request, start + shift, n, h)


@mutant("blocks", "HSH-4")
class BlockWithoutItsFirstKey(ModelBackend):
    """A block begins one token late: its first key is in none."""

    def head(self, place: Any, arrays: Any, request: Request, buffers: Any) -> Head:
        own = super().head(place, arrays, request, buffers)
        if own.labels is None:
            return own
        queries, keys = own.labels
        at = own.starts[1] + np.arange(keys.shape[1])
        return own._replace(labels=(queries, np.where(keys == at, -2, keys)))


@mutant("blocks", "NUM-13")
class LabelsInFloat32(ModelBackend):
    """Labels are held in float32, which merges neighbouring blocks from 2^24 on."""

    def labels(self, request: Request, start: int, n: int, h: int) -> Any:
        return super().labels(request, start, n, h).astype(np.float32)


# --- weights --------------------------------------------------------------------------------------


@mutant("weights", "ATT-13")
class ScaledBias(ModelBackend):
    """The scale multiplies the bias, too."""

    def bias(self, head: Head, distance: Any) -> Any:
        return head.acc.type(head.static.scale) * super().bias(head, distance)


@mutant("weights", "ATT-10")
class SlopeZeroIsMissing(ModelBackend):
    """A slope of 0 is taken for none, and replaced by the default."""

    def slope(self, slopes: Any, b: int, h: int, acc: Any) -> Any:
        heads = np.shape(slopes)[-1]
        return super().slope(slopes, b, h, acc) or acc.type(alibi_slopes(heads)[h])


@mutant("weights", "ATT-9")
class SlopesOfRow0(ModelBackend):
    """All batch rows have the slopes of the first."""

    def slope(self, slopes: Any, b: int, h: int, acc: Any) -> Any:
        return super().slope(slopes, 0, h, acc)


@mutant("weights", "ATT-9")
class SlopesIgnored(ModelBackend):
    """The kernel makes the published slopes itself, whatever it is given."""

    def slope(self, slopes: Any, b: int, h: int, acc: Any) -> Any:
        return super().slope(tuple(alibi_slopes(np.shape(slopes)[-1])), b, h, acc)


@mutant("weights", "MTH-1")
class GrowthAhead(ModelBackend):
    """The bias is slope times (j - i): keys after the query gain weight with distance."""

    def log_weight(self, head: Head, i: int, j: int) -> Any:
        own = super().log_weight(head, i, j)
        if head.labels is not None:
            return own
        return np.where(self.apart(head, i, j) < 0, -own, own)


@mutant("weights", "MTH-2")
class WindowOneShort(ModelBackend):
    """A window of width w holds the distances below w."""

    def width(self, static: Static, h: int) -> int:
        own = super().width(static, h)
        return own - 1 if isinstance(static.weight, DecayWeight) else own


@mutant("weights", "MTH-2")
class WindowOfThePast(ModelBackend):
    """A window reaches back only, though the call is not causal."""

    def log_weight(self, head: Head, i: int, j: int) -> Any:
        ahead = (self.apart(head, i, j) < 0) & (head.static.method == "window")
        return np.where(ahead, -np.inf, super().log_weight(head, i, j))


@mutant("weights", "MTH-2")
class WindowsOfHead0(ModelBackend):
    """All heads have the width of head 0."""

    def width(self, static: Static, h: int) -> int:
        return super().width(static, 0 if isinstance(static.weight, DecayWeight) else h)


@mutant("weights", "MTH-2")
class WidthZeroIsUnlimited(ModelBackend):
    """A window of width 0 is taken for none."""

    def width(self, static: Static, h: int) -> int:
        own = super().width(static, h)
        return own or UNLIMITED if isinstance(static.weight, DecayWeight) else own


# --- pooling --------------------------------------------------------------------------------------


@mutant("pooling", "NUM-6")
class CountNotDivided(ModelBackend):
    """Shared blocks are counted and not divided by the samples: only the lse is wrong, by ln s."""

    def log_weight(self, head: Head, i: int, j: int) -> Any:
        own = super().log_weight(head, i, j)
        return own if head.labels is None else own + np.log(head.acc.type(len(head.labels[0])))


@mutant("pooling", "MTH-3")
class MeanOfOutputs(ModelBackend):
    """The normalised outputs of the partitions are averaged, not their numerators."""

    def attend(self, q: Any, k: Any, v: Any, request: Request) -> AttentionOutput:
        out, lse = super().attend(q, k, v, request)
        if isinstance(request.static.weight, DecayWeight):
            return AttentionOutput(out, lse)
        samples = range(request.static.weight.samples)
        parts = [OneSample(r).attend(q, k, v, request).out.astype(lse.dtype) for r in samples]
        return AttentionOutput(np.mean(parts, axis=0).astype(out.dtype), lse)


@mutant("pooling", "NUM-6")
class SharedOrNot(ModelBackend):
    """Two tokens that share any block have the full weight."""

    def count(self, of_queries: Any, of_keys: Any, i: int, j: int) -> Any:
        count = super().count(of_queries, of_keys, i, j)
        return np.where(count > 0, len(of_queries), 0)


@mutant("pooling", "NUM-6")
class FirstSampleOnly(ModelBackend):
    """The first partition stands for all."""

    def labels(self, request: Request, start: int, n: int, h: int) -> Any:
        return super().labels(request, start, n, h)[:1]


@mutant("pooling", "ATT-7")
class LseInLog2(ModelBackend):
    """The lse is in units of log2, in which the kernel computes."""

    def lse(self, state: Softmax) -> Any:
        return super().lse(state) / np.log(state.top.dtype.type(2))


@mutant("pooling", "ATT-7")
class LseWithoutItsShift(ModelBackend):
    """The maximum is not added back to the log of the sum."""

    def lse(self, state: Softmax) -> Any:
        return np.log(state.total)


@mutant("pooling", "ATT-7")
class LseOfTheLastTile(ModelBackend):
    """The sum of each tile of keys replaces the one before; the output does not notice."""

    def attend_tile(self, head: Head, i: int) -> Any:
        out, _ = super().attend_tile(head, i)
        return out, self.lse(_LastTile().walk(head, i))


class _LastTile(ModelBackend):
    """Visits the last tile of keys only."""

    def key_tiles(self, head: Head, i: int) -> range:
        return super().key_tiles(head, i)[-1:]


@mutant("pooling", "NUM-5")
class NotRescaled(ModelBackend):
    """What is summed so far is not rescaled when a tile has a larger maximum."""

    def fold(self, head: Head, state: Softmax, scores: Any, v: Any) -> Softmax:
        top = np.where(state.total > 0, np.maximum(state.top, scores.max(axis=1)), -np.inf)
        return super().fold(head, state._replace(top=top), scores, v)


@mutant("pooling", "NUM-4")
class ShiftOfHiddenKeys(ModelBackend):
    """The shift is the largest score, hidden pairs included, and nothing checks the sum."""

    def scores(self, head: Head, i: int, j: int, q: Any, k: Any) -> Any:
        head.buffers["largest"] = np.nan_to_num((q @ k.T).max(axis=1))
        return super().scores(head, i, j, q, k)

    def fold(self, head: Head, state: Softmax, scores: Any, v: Any) -> Softmax:
        top = np.maximum(state.top, head.buffers["largest"])
        kept = np.exp(state.top - top)
        rescaled = Softmax(top, state.total * kept, state.values * kept[:, None])
        return super().fold(head, rescaled, scores, v)


@mutant("pooling", "NUM-4")
class HiddenByAFiniteNumber(ModelBackend):
    """Hidden scores are lowered by 10^4, not removed: a row that sees nothing averages them."""

    def scores(self, head: Head, i: int, j: int, q: Any, k: Any) -> Any:
        own = super().scores(head, i, j, q, k)
        return np.where(own > -np.inf, own, q @ k.T - head.acc.type(1e4))


@mutant("pooling", "ATT-21")
class DeadRowsNan(ModelBackend):
    """A row that sees no key is 0 / 0."""

    def divide(self, state: Softmax) -> Any:
        return state.values / state.total[:, None]


@mutant("pooling", "ATT-21")
class DeadRowsFinite(ModelBackend):
    """A row that sees no key has the lowest finite number for its lse."""

    def lse(self, state: Softmax) -> Any:
        return np.maximum(super().lse(state), np.finfo(state.top.dtype).min)
