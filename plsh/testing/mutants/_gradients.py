"""Faults of the backward pass."""

from typing import Any

import numpy as np

from plsh.backend import AttentionOutput, Gradients, Request
from plsh.testing.model import Head, ModelBackend, Rows
from plsh.weights import DecayWeight

from ._mutant import Mutant, OneSample, changed, collector

MUTANTS: list[Mutant] = []
mutant = collector(MUTANTS)


@mutant("gradients", "ATT-26")
class GradientByLseIgnored(ModelBackend):
    """The gradient by the lse is ignored."""

    def delta(self, grad: Any, out: Any, by_lse: Any) -> Any:
        return super().delta(grad, out, 0.0)


@mutant("gradients", "ATT-26")
class GradientByLseNegated(ModelBackend):
    """The gradient by the lse has the wrong sign."""

    def delta(self, grad: Any, out: Any, by_lse: Any) -> Any:
        return super().delta(grad, out, -by_lse)


@mutant("gradients", "NUM-8")
class DeltaOfTheTile(ModelBackend):
    """What a row takes off dP is summed over a tile of keys, not over the row."""

    def pair_gradients(self, head: Head, rows: Rows, i: int, j: int, q: Any, k: Any, v: Any) -> Any:
        p, ds = super().pair_gradients(head, rows, i, j, q, k, v)
        return p, ds - p * ds.sum(axis=1, keepdims=True)


@mutant("gradients", "NUM-10")
class GradientsOfEachPartition(ModelBackend):
    """Each partition is differentiated by its own lse, and the gradients are averaged."""

    def vjp(
        self, q: Any, k: Any, v: Any, output: Any, grad_out: Any, grad_lse: Any, request: Request
    ) -> Gradients:
        whole = super().vjp(q, k, v, output, grad_out, grad_lse, request)
        if isinstance(request.static.weight, DecayWeight):
            return whole
        parts = []
        for one in map(OneSample, range(request.static.weight.samples)):
            own = one.attend(q, k, v, request)
            parts.append(one.vjp(q, k, v, own, grad_out, grad_lse, request))
        wide = output.lse.dtype
        dq, dk, dv = (
            np.mean([getattr(part, name).astype(wide) for part in parts], axis=0).astype(q.dtype)
            for name in ("q", "k", "v")
        )
        return Gradients(dq, dk, dv, None)


@mutant("gradients", "NUM-9")
class GradientBySlopesNegated(ModelBackend):
    """The gradient by the slopes has the wrong sign."""

    def slope_gradient(self, by_slope: Any, acc: Any, request: Request) -> Any:
        return super().slope_gradient(-by_slope, acc, request)


@mutant("gradients", "NUM-9")
class GradientBySlopesScaled(ModelBackend):
    """The gradient by the slopes is multiplied by the scale of the scores."""

    def slope_gradient(self, by_slope: Any, acc: Any, request: Request) -> Any:
        return super().slope_gradient(by_slope * request.static.scale, acc, request)


@mutant("gradients", "NUM-9")
class GradientBySlopesZero(ModelBackend):
    """The gradient by the slopes is a zero."""

    def slope_gradient(self, by_slope: Any, acc: Any, request: Request) -> Any:
        return super().slope_gradient(0 * by_slope, acc, request)


@mutant("gradients", "NUM-9")
class GradientBySlopesOfAllRows(ModelBackend):
    """Slopes of each batch row get the gradient summed over the batch."""

    def slope_gradient(self, by_slope: Any, acc: Any, request: Request) -> Any:
        every = np.broadcast_to(by_slope.sum(axis=0), by_slope.shape)
        if np.ndim(request.arrays.slopes) == 1:
            every = by_slope
        return super().slope_gradient(every, acc, request)


@mutant("gradients", "NUM-9")
class GradientBySlopesOfTheLastRow(ModelBackend):
    """The gradient by the slopes of all batch rows is that of the last."""

    def slope_gradient(self, by_slope: Any, acc: Any, request: Request) -> Any:
        own = by_slope if np.ndim(request.arrays.slopes) == 2 else by_slope[-1:]
        return super().slope_gradient(own, acc, request)


@mutant("gradients", "ATT-26")
class GradientBySlopesUnderLsh(ModelBackend):
    """Under lsh the slopes get a gradient of zeros."""

    def slope_gradient(self, by_slope: Any, acc: Any, request: Request) -> Any:
        own = super().slope_gradient(by_slope, acc, request)
        return np.zeros(by_slope.shape[1], dtype=acc) if own is None else own


@mutant("gradients", "ATT-13")
class ScaleTwiceInKeys(ModelBackend):
    """The gradient by k is multiplied by the scale again, which q carries already."""

    def key_gradients(self, group: Any, rows: Any, j: int) -> Any:
        dk, dv = super().key_gradients(group, rows, j)
        return dk * group[0].acc.type(group[0].static.scale), dv


@mutant("gradients", "ATT-4")
class GradientsOfTheLastHead(ModelBackend):
    """Each query head overwrites the gradient by k and v of its group's others."""

    def key_gradients(self, group: Any, rows: Any, j: int) -> Any:
        return super().key_gradients(group[-1:], rows[-1:], j)


@mutant("gradients", "NUM-8")
class GradientsOfTheLastTile(ModelBackend):
    """Each tile of queries overwrites the gradient by k and v of the tiles before."""

    def query_tiles(self, head: Head, j: int) -> range:
        return super().query_tiles(head, j)[-1:]


@mutant("gradients", "NUM-8")
class BandOfTheForwardPass(ModelBackend):
    """The backward pass walks from keys to queries with the causal band of the forward pass."""

    def query_tiles(self, head: Head, j: int) -> range:
        first = head.starts[1] + j - head.starts[0]
        after = 0 if head.static.causal else head.width
        return self.tiles(first - head.width, first + self.tile + after, head.q.shape[0])


@mutant("gradients", "ATT-21")
class DeadRowsHaveNanGradients(ModelBackend):
    """In the backward pass a row that saw no key is exp(-inf + inf)."""

    def pair_gradients(self, head: Head, rows: Rows, i: int, j: int, q: Any, k: Any, v: Any) -> Any:
        p, ds = super().pair_gradients(head, rows, i, j, q, k, v)
        dead = rows.lse[i : i + self.tile] == -np.inf
        dead[len(head.q) - i :] = False
        return p, ds + np.where(dead, np.nan, 0)[:, None]


@mutant("gradients", "ATT-19")
class SegmentsIgnoredBackward(ModelBackend):
    """The backward pass forgets the segments."""

    def vjp(
        self, q: Any, k: Any, v: Any, output: Any, grad_out: Any, grad_lse: Any, request: Request
    ) -> Gradients:
        open_ = changed(request, segment_ids=None)
        return super().vjp(q, k, v, output, grad_out, grad_lse, open_)


@mutant("gradients", "NUM-9")
class BiasIgnoredBackward(ModelBackend):
    """The backward pass makes P without the bias."""

    def pair_gradients(self, head: Head, rows: Rows, i: int, j: int, q: Any, k: Any, v: Any) -> Any:
        flat = head if head.slope is None else head._replace(slope=0 * head.slope)
        return super().pair_gradients(flat, rows, i, j, q, k, v)


@mutant("gradients", "NUM-1")
class LseRoundedBackward(ModelBackend):
    """The backward pass keeps the lse in the input dtype."""

    def row_terms(self, head: Head, output: AttentionOutput, grad_out: Any, grad_lse: Any) -> Rows:
        rows = super().row_terms(head, output, grad_out, grad_lse)
        return rows._replace(lse=self.narrow(head, rows.lse))


@mutant("gradients", "NUM-1")
class GradientsAddedUpInHalf(ModelBackend):
    """The gradients by k and v add up in the input dtype."""

    def key_gradients(self, group: Any, rows: Any, j: int) -> Any:
        totals = [0 * self.load_keys(group[0], j), 0 * self.load_values(group[0], j)]
        for head, own in zip(group, rows, strict=True):
            for i in self.query_tiles(head, j):
                part = _OneTile(i).key_gradients([head], [own], j)
                totals = [self.narrow(head, t + x) for t, x in zip(totals, part, strict=True)]
        return totals


class _OneTile(ModelBackend):
    """Gradients by k and v from one tile of queries."""

    def __init__(self, i: int) -> None:
        self.i = i

    def query_tiles(self, head: Head, j: int) -> range:
        return range(self.i, self.i + 1, self.tile)
