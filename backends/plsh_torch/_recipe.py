"""A request as the plain values and tensors that an operator takes, and back.

What may change from call to call without a new compilation is an integer or a tensor: lengths,
offsets, the seed. Nothing is drawn here; `decode` runs inside the operator.
"""

import functools
from typing import Any, NamedTuple

from torch import Tensor

from plsh import FixedBlocks, IndependentCuts, PowerLawBinning, RandomBinning
from plsh.backend import Operands, Request, Static
from plsh.weights import DecayWeight, StepWeight, TableWeight, Weight

FAMILIES = {
    family.__name__: family
    for family in (FixedBlocks, IndependentCuts, PowerLawBinning, RandomBinning)
}


class Recipe(NamedTuple):
    """The plain values of a request, in the order of the operators' arguments."""

    causal: bool
    scale: float
    slopes: list[float]  # (H,) or (B, H), or none
    q_offset: list[int]  # one, or one per batch row, or none
    k_offset: list[int]
    bandwidths: list[int]  # of a decay or a table
    samples: int
    sampler: str  # "" for none
    table: list[int]  # start and stop of a table
    family: str
    parameters: list[float]  # (parameters, H)
    seed: list[int]
    head_ids: list[int]


class Given(NamedTuple):
    """The tensors of a request beside q, k and v, in the order of the operators' arguments."""

    slopes: Tensor | None
    q_offset: Tensor | None
    k_offset: Tensor | None
    q_segments: Tensor | None
    k_segments: Tensor | None
    labels: Tensor | None


def encode(request: Request, labels: Tensor | None) -> tuple[Given, Recipe]:
    """Take a request apart."""
    static, arrays = request.static, request.arrays
    weight, slopes = static.weight, arrays.slopes
    host: list[float] = []
    if isinstance(slopes, tuple):
        host = [m for row in slopes for m in (row if isinstance(row, tuple) else (row,))]
    ids_q, ids_k = (None, None) if arrays.segment_ids is None else arrays.segment_ids
    given = Given(
        None if isinstance(slopes, tuple) else slopes,
        _tensor(arrays.q_offset),
        _tensor(arrays.k_offset),
        ids_q,
        ids_k,
        labels,
    )
    step = weight if isinstance(weight, StepWeight) else None
    return given, Recipe(
        static.causal,
        static.scale,
        host,
        _numbers(arrays.q_offset),
        _numbers(arrays.k_offset),
        [] if isinstance(weight, StepWeight) else list(weight.bandwidths),
        0 if isinstance(weight, DecayWeight) else weight.samples,
        (step.sampler or "") if step else "",
        [weight.start, weight.stop] if isinstance(weight, TableWeight) else [],
        type(step.family).__name__ if step else "",
        _parameters(step) if step else [],
        _words(step.seed) if step else [],
        _words(step.head_ids) if step else [],
    )


def _tensor(offset: Any) -> Tensor | None:
    return None if isinstance(offset, int | tuple) else offset


def _numbers(offset: Any) -> list[int]:
    if isinstance(offset, tuple):
        return list(offset)
    return [offset] if isinstance(offset, int) else []


def _parameters(weight: StepWeight) -> list[float]:
    rows = weight.family.per_head(len(weight.head_ids))
    return [row[i] for i in range(len(rows[0]) if rows else 0) for row in rows]


def _words(words: Any) -> list[int]:
    """Return unsigned words as signed ones, which an operator takes."""
    words = words if isinstance(words, tuple) else (words,)
    return [word - (1 << 64) if word >= 1 << 63 else word for word in words]


def decode(q: Tensor, k: Tensor, v: Tensor, given: Given, recipe: Recipe) -> Request:
    """Put a request together on the host: offsets and slopes are numbers, labels NumPy."""
    heads, dim = q.shape[1], q.shape[3]
    weight = weight_of(q, recipe)
    slopes: Any = None
    if isinstance(weight, DecayWeight):
        slopes = tuple(recipe.slopes)
        if len(slopes) > heads:
            slopes = tuple(slopes[i : i + heads] for i in range(0, len(slopes), heads))
        if given.slopes is not None:
            slopes = _tuples(given.slopes.tolist())
    static = Static(
        "exact" if isinstance(weight, DecayWeight) else "lsh",
        weight,
        recipe.causal,
        recipe.scale,
        heads,
        k.shape[1],
        dim,
        v.shape[3],
        str(q.dtype).rpartition(".")[2],
        "torch",
    )
    segments = None
    if given.q_segments is not None and given.k_segments is not None:
        segments = (given.q_segments, given.k_segments)
    arrays = Operands(
        slopes,
        _offset(given.q_offset, recipe.q_offset),
        _offset(given.k_offset, recipe.k_offset),
        segments,
        None if given.labels is None else given.labels.numpy(),
    )
    return Request(static, arrays)


def weight_of(q: Tensor, recipe: Recipe) -> Weight:
    """Return the weight of a recipe; equal recipes share one object."""
    return _weight(
        q.shape[1],
        tuple(recipe.bandwidths),
        recipe.samples,
        recipe.sampler,
        tuple(recipe.table),
        recipe.family,
        tuple(recipe.parameters),
        tuple(recipe.seed),
        tuple(recipe.head_ids),
    )


def _offset(given: Tensor | None, numbers: list[int]) -> Any:
    found = tuple(numbers) if given is None else _tuples(given.tolist())
    return found[0] if isinstance(found, tuple) and len(found) == 1 else found


def _tuples(values: Any) -> Any:
    return tuple(map(_tuples, values)) if isinstance(values, list) else values


@functools.lru_cache(maxsize=256)
def _weight(
    heads: int,
    bandwidths: tuple[int, ...],
    samples: int,
    sampler: str,
    table: tuple[int, ...],
    family: str,
    parameters: tuple[float, ...],
    seed: tuple[int, ...],
    head_ids: tuple[int, ...],
) -> Weight:
    if not samples or not heads:
        return DecayWeight(bandwidths)
    if table:
        return TableWeight(samples, table[0], table[1], bandwidths)
    columns = [parameters[i : i + heads] for i in range(0, len(parameters), heads)]
    made = FAMILIES[family](*columns)
    words = [tuple(word % (1 << 64) for word in x) for x in (seed, head_ids)]
    key = words[0][0] if len(words[0]) == 1 else words[0]
    return StepWeight(made, samples, sampler or None, key, words[1])
