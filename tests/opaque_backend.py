"""A backend that compilers can't see into: one custom operator, whose body calls the reference.

It is what a kernel library looks like to ``torch.compile``: tensors and primitives go in, so
everything before it (`plsh.attention` itself) must be traceable, and the blocks are drawn inside.
`BACKEND` goes to `plsh.register_backend`.
"""

import torch
from torch import Tensor

import plsh
from plsh.backend import (
    SPEC_VERSION,
    AttentionOutput,
    Availability,
    Capabilities,
    Harness,
    Operands,
    Request,
    Static,
)
from plsh.reference import BACKEND as REFERENCE
from plsh.weights import DecayWeight, StepWeight, TableWeight


@torch.library.custom_op("plsh_tests::attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    q_offset: Tensor | None,
    k_offset: Tensor | None,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    labels: Tensor | None,
    method: str,
    causal: bool,
    scale: float,
    host_slopes: list[float],
    offsets: list[int],
    bandwidths: list[int],
    table: list[int],
    family: str,
    parameters: list[float],
    samples: int,
    sampler: str | None,
    seed: list[int],
    head_ids: list[int],
) -> tuple[Tensor, Tensor]:
    """Rebuild the request from primitives and let the reference serve it."""
    batch, heads, _, dim = q.shape
    weight: DecayWeight | StepWeight | TableWeight
    if method != "lsh":
        weight = DecayWeight(tuple(bandwidths))
    elif table:
        weight = TableWeight(samples, *table, tuple(bandwidths))
    else:
        recipe = getattr(plsh, family)(tuple(parameters))
        key = seed[0] if len(seed) == 1 else tuple(seed)
        weight = StepWeight(recipe, samples, sampler, key, tuple(head_ids))
    static = Static(
        method=method,
        weight=weight,
        causal=causal,
        scale=scale,
        heads=heads,
        kv_heads=k.shape[1],
        head_dim=dim,
        value_dim=v.shape[-1],
        dtype=str(q.dtype).rpartition(".")[2],
        array_kind="torch",
    )
    rows = tuple(host_slopes)
    if len(rows) > heads:
        rows = tuple(rows[i : i + heads] for i in range(0, len(rows), heads))
    half = len(offsets) // 2
    known_q, known_k = offsets[:half], offsets[half:]
    arrays = Operands(
        slopes=slopes if slopes is not None else rows or None,
        q_offset=q_offset if q_offset is not None else _offset(known_q, batch),
        k_offset=k_offset if k_offset is not None else _offset(known_k, batch),
        segment_ids=None if q_segments is None else (q_segments, k_segments),
        labels=labels,
    )
    out, lse = REFERENCE.attend(q, k, v, Request(static, arrays))
    return out.contiguous(), lse.contiguous()


def _offset(values, batch):
    return values[0] if len(values) == 1 else tuple(values)


@attend.register_fake
def _(q, k, v, *args):
    rows = q.shape[:-1]
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*rows, v.shape[-1])), q.new_empty(rows, dtype=exact)


class OpaqueBackend:
    """Serves torch tensors through the operator; `attend` only takes the request apart."""

    name = "opaque"
    spec_version = SPEC_VERSION

    def availability(self):
        return Availability(True)

    def capabilities(self):
        return Capabilities(arrays=("torch",), transforms=("compile",))

    def can_run(self, request):
        return None

    def harness(self):
        return Harness(
            asarray=lambda x, dtype, device=None: torch.asarray(x, dtype=getattr(torch, dtype)),
            to_numpy=lambda x: x.detach().float().numpy(),
            synchronize=lambda x: None,
        )

    def attend(self, q, k, v, request):
        static, arrays = request.static, request.arrays
        weight = static.weight
        step = isinstance(weight, StepWeight)
        table = isinstance(weight, TableWeight)
        tensors = [
            x if isinstance(x, Tensor) else None
            for x in (arrays.slopes, arrays.q_offset, arrays.k_offset)
        ]
        slopes = arrays.slopes if isinstance(arrays.slopes, tuple) else ()
        if slopes and isinstance(slopes[0], tuple):
            slopes = tuple(m for row in slopes for m in row)
        ids = arrays.segment_ids or (None, None)
        offsets = [
            x if isinstance(x, tuple) else (0 if isinstance(x, Tensor) else x,)
            for x in (arrays.q_offset, arrays.k_offset)
        ]
        longest = max(len(x) for x in offsets)
        offsets = [x if len(x) == longest else x * longest for x in offsets]
        out, lse = attend(
            q,
            k,
            v,
            *tensors,
            *ids,
            torch.as_tensor(arrays.labels) if table else None,
            static.method,
            static.causal,
            static.scale,
            list(slopes),
            [p for x in offsets for p in x],
            [] if step else list(weight.bandwidths),
            [weight.start, weight.stop] if table else [],
            type(weight.family).__name__ if step else "",
            list(weight.family._parameters()[0]) if step else [],
            weight.samples if step or table else 0,
            weight.sampler if step else None,
            ([weight.seed] if isinstance(weight.seed, int) else list(weight.seed)) if step else [],
            list(weight.head_ids) if step else [],
        )
        return AttentionOutput(out, lse)


BACKEND = OpaqueBackend()
