"""The single-pass band kernel: every pair in the band is scored once.

For each piece of keys of a group of queries, each step one batched product or one pass:

    S = q k^T + bias        E = exp2(S - shift)        P = E * factor        out = P v / sum(P)

Logits are in units of log2, whose exponential takes half the time. The shift is a row's largest
logit so far, hidden pairs included; it is left out where the norms of q and k bound the logits.
Rows whose sum is then small, or not finite, are done again from their own visible maximum.
"""

import math
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ._tiles import Sum, Tiles
from ._weights import LOG2E, Piece
from ._whole import Whole

LN2 = math.log(2)
Group: TypeAlias = Tiles | Whole


class Limits(NamedTuple):
    """Exponents of 2 between which an accumulation dtype is safe."""

    bound: float  # logits within need no shift
    floor: float  # below, exponentials go denormal, which costs ten times as much
    least: float  # a row's sum below, after the shift, has lost digits


LIMITS = {
    torch.float32: Limits(60.0, -120.0, 2.0**-80),
    torch.float64: Limits(500.0, -1000.0, 2.0**-900),
}
STRIP = 256
"""Most keys that a product sums one after another: long running sums lose digits."""
ALIAS = 256
"""Rows of pairs that are a multiple of this apart, and longer, share few lines of the first-level
cache, when a backward pass multiplies by their transpose."""
PAD = 16
"""Numbers between such rows. Others follow one another: only then is a batch one product for BLAS,
and not one for each tile."""
LEAST = -24.0
"""Log2 of a row's sum below which its logits have lost digits to the bias that they share."""


class Mode(NamedTuple):
    """How carefully a group's exponentials are made."""

    large: Tensor | None  # (N, 1, 1): products whose logits need a shift; None for none
    bounded: bool  # no exponent leaves the safe range: hide by -inf, and clamp nothing


def empty_pairs(group: Group, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return scratch memory for pairs ``(N, R, W)``."""
    products, rows, count = shape
    pad = PAD if count > ALIAS and count % ALIAS == 0 else 0
    return group.scratch.get(name, (products, rows, count + pad), group.acc)[..., :count]


def scores(group: Group, q: Tensor, k: Tensor, piece: Piece, scale: float, bounded: bool) -> Tensor:
    """Return the logits of a piece ``(N, R, W)`` in units of log2, bias included."""
    p = empty_pairs(group, "p", (*q.shape[:2], k.shape[1]))
    beta = group.start(group.pairs(p), piece, bounded)
    return p.baddbmm_(q, k.mT, beta=beta, alpha=scale * LOG2E)


def apply(group: Group, p: Tensor, factors: tuple[Tensor | None, ...]) -> None:
    """Multiply exponentials by what hides and weighs pairs."""
    for factor in factors:
        if factor is not None:
            group.pairs(p).mul_(factor)


def hide(group: Group, p: Tensor, factors: tuple[Tensor | None, ...], value: float) -> None:
    """Set hidden pairs to a value, whatever stands there."""
    for factor in factors:
        if factor is not None:
            group.pairs(p).masked_fill_(factor == 0, value)


def add_product(
    group: Group, to: Tensor, pairs: Tensor, x: Tensor, scale: float, fresh: bool
) -> None:
    """Add ``scale * pairs x`` to ``(N, R, D)``, or write it; pairs ``(N, R, W)``, x ``(N, W, D)``.

    Strips of keys, of nearly equal length, have products of their own: BLAS may sum one after
    another, starting from what stands there.
    """
    strips = -(-x.shape[1] // STRIP)
    if strips == 1:
        to.baddbmm_(pairs, x, beta=0 if fresh else 1, alpha=scale)
        return
    # Views are made at once: at each operation a thread may lose the interpreter.
    own = zip(pairs.tensor_split(strips, dim=-1), x.tensor_split(strips, dim=1), strict=True)
    if fresh:
        to.baddbmm_(*next(own), beta=0, alpha=scale)
    part = group.scratch.get("strip", to.shape, group.acc)
    for left, right in own:
        to.add_(torch.bmm(left, right, out=part), alpha=scale)


def forward(
    group: Group,
    tokens: tuple[Tensor, Tensor, Tensor],
    scale: float,
    mode: Mode,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Write the group's rows of ``out (B, H, Nq, Dv)`` and ``lse (B, H, Nq)``."""
    limits = LIMITS[group.acc]
    q = group.queries("q", tokens[0])
    total = group.scratch.get("total", (*q.shape[:2], 1), group.acc).zero_()
    shift: Tensor | None = None
    place = group.place(out)
    o = place
    if o is None:
        o = group.scratch.get("out", (*q.shape[:2], out.shape[-1]), group.acc)
    for i, piece in enumerate(group.pieces):
        k, v = (group.keys(name, x, piece) for name, x in zip("kv", tokens[1:], strict=True))
        p = scores(group, q, k, piece, scale, mode.bounded)
        if mode.large is not None:
            top = p.amax(dim=-1, keepdim=True)
            # 0 in a small product, so that it does not depend on its mates.
            top = torch.where(mode.large, top, 0)
            if shift is not None:
                top = torch.maximum(top, shift)
                fade = torch.exp2(shift - top)
                total *= fade
                o *= fade
            shift = top
            p -= shift
        if not mode.bounded:
            p.clamp_(min=limits.floor)
        p.exp2_()
        apply(group, p, (group.factor(piece, mode.bounded), group.mask(piece)))
        total += p.sum(dim=-1, keepdim=True)
        add_product(group, o, p, v, 1.0, i == 0)
    log = total.to(torch.float64).log2()
    right = None
    if shift is not None or not total.amin().item() >= 2.0**LEAST:  # NaN too
        log = log if shift is None else log + shift
        dead = total == 0
        right = ((total >= limits.least) & (log >= LEAST)) | dead
        total = total.masked_fill(dead, 1)
    o /= total
    fine = right is None or bool(right.all())
    if not (fine and math.isfinite(o.sum().item())):  # lost digits, NaN, or sums past the range
        finite = torch.isfinite(o).all(dim=-1, keepdim=True)
        wrong = ~(finite if right is None else right & finite)
        again, log_again = by_row(group, tokens, scale)
        o.copy_(torch.where(wrong, again, o))
        log = torch.where(wrong, log_again, log)
    group.put(lse, log.mul_(LN2).sub_(group.weight.normaliser)[..., 0])
    if place is None:
        group.put(out, o)


def by_row(
    group: Group, tokens: tuple[Tensor, Tensor, Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """Return out ``(N, R, Dv)`` and log2 of the sums, each row from its largest visible logit.

    First the maximum and the sum, then the normalised weights: a mean of values is within their
    range. Logits are in units of e, so that distances enter as they are.
    """
    q = group.queries("q", tokens[0])
    top = torch.full((*q.shape[:2], 1), -math.inf, dtype=group.acc, device="cpu")
    total = torch.zeros_like(top)

    def logits(piece: Piece) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        k = group.keys("k", tokens[1], piece)
        p = empty_pairs(group, "p", (*q.shape[:2], k.shape[1]))
        p.baddbmm_(q, k.mT, beta=group.start_exactly(group.pairs(p), piece), alpha=scale)
        factors = (group.factor(piece, False), group.mask(piece))
        hide(group, p, factors, -math.inf)
        return p, factors

    for piece in group.pieces:
        p, factors = logits(piece)
        higher = torch.maximum(top, p.amax(dim=-1, keepdim=True))
        shift = higher.masked_fill(higher == -math.inf, 0)
        p.sub_(shift).exp_()
        apply(group, p, factors)
        total = total * torch.exp(top - shift) + p.sum(dim=-1, keepdim=True)
        top = higher
    shift = top.masked_fill(top == -math.inf, 0)
    out = torch.zeros((*q.shape[:2], tokens[2].shape[-1]), dtype=group.acc, device="cpu")
    for piece in group.pieces:
        p, factors = logits(piece)
        p.sub_(shift).exp_()
        apply(group, p, factors)
        p /= total.masked_fill(total == 0, 1)
        add_product(group, out, p, group.keys("v", tokens[2], piece), 1.0, False)
    return out, total.to(torch.float64).log2() + shift.to(torch.float64) * LOG2E


class Given(NamedTuple):
    """What the backward pass is given, of all heads."""

    out: Tensor  # (B, H, Nq, Dv)
    lse: Tensor  # (B, H, Nq)
    grad_out: Tensor  # (B, H, Nq, Dv)
    grad_lse: Tensor  # (B, H, Nq)


class Wanted(NamedTuple):
    """Where gradients go; None where none is asked for."""

    q: Tensor | None  # (B, H, Nq, D)
    k: Sum | None
    v: Sum | None
    slopes: Tensor | None  # (B, H), float64, added to


def backward(
    group: Group,
    tokens: tuple[Tensor, Tensor, Tensor],
    scale: float,
    bounded: bool,
    given: Given,
    wanted: Wanted,
) -> None:
    """Write the group's rows of dq, add to dk, dv and the gradient by the slopes.

    With the merged output O and P normalised by the merged lse, ``dS = P * (dP - rowsum(dO * O) +
    dlse)``.
    """
    limits = LIMITS[group.acc]
    q = group.queries("q", tokens[0])
    do, log, base = _row_terms(group, given)
    dq = None
    if wanted.q is not None:
        dq = group.scratch.get("dq", q.shape, group.acc)
    for i, piece in enumerate(group.pieces):
        k, v = (group.keys(name, x, piece) for name, x in zip("kv", tokens[1:], strict=True))
        p = scores(group, q, k, piece, scale, bounded)
        p -= log
        if not bounded:  # a visible pair's exponent is at most 0; a hidden one's may be anything
            p.clamp_(limits.floor, 1.0)
        p.exp2_()
        factors = (group.factor(piece, bounded), group.mask(piece))
        apply(group, p, factors)
        if not bounded:
            hide(group, p, factors, 0.0)
        if wanted.v is not None:
            group.add_to_keys(wanted.v, piece, p, do, 1.0)
        if wanted.q is None and wanted.k is None and wanted.slopes is None:
            continue
        ds = empty_pairs(group, "ds", p.shape)
        ds.copy_(base).baddbmm_(do, v.mT, beta=-1).mul_(p)
        if not bounded:
            hide(group, ds, factors, 0.0)
        if dq is not None:
            add_product(group, dq, ds, k, scale, i == 0)
        if wanted.k is not None:
            group.add_to_keys(wanted.k, piece, ds, q, scale)
        if wanted.slopes is not None:
            group.per_head(wanted.slopes).sub_(group.distance_sum(ds, piece))
    if wanted.q is not None and dq is not None:
        group.put(wanted.q, dq)


def _row_terms(group: Group, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """Return dO, the lse in units of log2, and rowsum(dO * O) - dlse, ``(N, R, ...)``.

    A row that saw no key, and what its cotangents hold, is zeroed.
    """
    lse = group.queries("lse", given.lse[..., None])
    log = (lse + group.weight.normaliser) * LOG2E
    do = group.queries("do", given.grad_out)
    base = torch.linalg.vecdot(do, group.queries("out", given.out))[..., None]
    base = base - group.queries("dlse", given.grad_lse[..., None])
    dead = lse == -math.inf
    if dead.any():
        log, do, base = (x.masked_fill(dead, 0) for x in (log, do, base))
    return do, log, base
