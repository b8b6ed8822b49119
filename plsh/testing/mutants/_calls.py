"""Faults that show where tiles are aligned just so, or where calls meet one another."""

from typing import Any

import numpy as np

from plsh.backend import AttentionOutput, Gradients, Request
from plsh.testing.model import Head, ModelBackend

from ._mutant import Mutant, collector

MUTANTS: list[Mutant] = []
mutant = collector(MUTANTS)


@mutant("tiles", "ATT-12", "ATT-18")
class MaskLeftOutTooSoon(ModelBackend):
    """A tile has no causal mask if its last key is at most one after the first query."""

    def visible(self, head: Head, i: int, j: int) -> Any:
        last_key = head.starts[1] + j + self.tile - 1
        if head.static.causal and last_key == head.starts[0] + i + 1:
            q_ids = head.ids[0][i : i + self.tile, None]
            k_ids = head.ids[1][None, j : j + self.tile]
            return (q_ids == k_ids) & (k_ids >= 0)
        return super().visible(head, i, j)


@mutant("precision", "NUM-6")
class CountsInHalf(ModelBackend):
    """Counts add up in float16, which is whole to 2048 only."""

    def count(self, of_queries: Any, of_keys: Any, i: int, j: int) -> Any:
        return np.minimum(super().count(of_queries, of_keys, i, j), 2048)


@mutant("masks", "ATT-19")
class IdsOf32Bits(ModelBackend):
    """Segment ids are cast to int32."""

    def segments(self, pair: Any, side: int, b: int, n: int) -> Any:
        return super().segments(pair, side, b, n).astype(np.int32).astype(np.int64)


@mutant("state", "NUM-11", "MTH-6")
class LabelsKeptByTheRecipe(ModelBackend):
    """Labels are kept by the static part of a request, which a PartitionSet's labels are not in."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def labels(self, request: Request, start: int, n: int, h: int) -> Any:
        key = (request.static, start, n, h)
        if key not in self.kept:
            self.kept[key] = super().labels(request, start, n, h)
        return self.kept[key]


@mutant("state", "NUM-11")
class ScaleShared(ModelBackend):
    """The scale of the call under way is kept on the backend, where two threads share it."""

    scale = 1.0

    def attend(self, q: Any, k: Any, v: Any, request: Request) -> AttentionOutput:
        self.scale = request.static.scale
        return super().attend(q, k, v, request)

    def load_queries(self, head: Head, i: int) -> Any:
        q = super().load_queries(head, i)
        q *= head.acc.type(self.scale / head.static.scale) if head.static.scale else 1
        return q


@mutant("state", "BCK-11", "NUM-11")
class OutputOfTheLastCall(ModelBackend):
    """The backward pass takes the last forward's output of that shape, not the one given."""

    last: AttentionOutput | None = None

    def attend(self, q: Any, k: Any, v: Any, request: Request) -> AttentionOutput:
        found = super().attend(q, k, v, request)
        self.last = AttentionOutput(found.out.copy(), found.lse.copy())
        return found

    def vjp(
        self, q: Any, k: Any, v: Any, output: Any, grad_out: Any, grad_lse: Any, request: Request
    ) -> Gradients:
        given = output
        if self.last is not None and self.last.out.shape == output.out.shape:
            given = self.last
        return super().vjp(q, k, v, given, grad_out, grad_lse, request)
