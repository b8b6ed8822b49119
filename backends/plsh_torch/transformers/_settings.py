"""What a model computes: its method, slopes and seed, kept on its attention modules."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import plsh
from plsh.weights import UNLIMITED, StepWeight

Method: TypeAlias = plsh.Exact | plsh.Window | plsh.PositionalLSH
Slopes: TypeAlias = tuple[float, ...]

KINDS: dict[str, type[Method]] = {
    "plsh": plsh.PositionalLSH,
    "plsh_window": plsh.Window,
    "plsh_exact": plsh.Exact,
}
"""Name of the attention implementation -> kind of its method."""
DEFAULTS: dict[str, Method] = {name: kind() for name, kind in KINDS.items()}

ATTRIBUTE = "plsh_settings"
"""Where an attention module keeps its model's settings."""


@dataclass
class Settings:
    """The settings of one model; its attention modules share the object.

    Parameters
    ----------
    method : Exact, Window or PositionalLSH
    slopes : tuple of float, optional
        None: `plsh.alibi_slopes`.
    seed : int
        Base seed of lsh; layers draw from (seed, layer[, step]).
    step : int, optional
    """

    method: Method
    slopes: Slopes | None
    seed: int = 0
    step: int | None = None


def plan_of(module: Any, name: str | None = None) -> tuple[Method, Slopes | None]:
    """Return method and slopes of an attention module under an implementation's name.

    The name decides what is computed. Settings of another kind of method give slopes and seed.
    """
    settings: Settings | None = getattr(module, ATTRIBUTE, None)
    if settings is None:
        method, slopes, seed, step = DEFAULTS[name or "plsh_window"], None, 0, None
    else:
        method, slopes, seed, step = (
            settings.method,
            settings.slopes,
            settings.seed,
            settings.step,
        )
        if name is not None and not isinstance(method, KINDS[name]):
            method = DEFAULTS[name]
    if isinstance(method, plsh.PositionalLSH):
        layer = module.layer_idx
        method = plsh.PositionalLSH(
            method.samples,
            sampler=method.sampler,
            seed=(seed, layer) if step is None else (seed, layer, step),
            family=method.family,
            head_ids=method.head_ids,
        )
    return method, slopes


def narrowed(method: Method, slopes: Slopes, reach: int) -> Method:
    """Return exact or window `method` within a sliding window, which sees `reach` tokens back."""
    if isinstance(method, plsh.Exact):
        return plsh.Window(reach)
    return plsh.Window(tuple(min(width, reach) for width in bandwidths(method, slopes)))


def of_heads(method: Method, heads: slice, count: int) -> Method:
    """Return the method of some of `count` heads."""
    if isinstance(method, plsh.Window) and isinstance(method.width, tuple):
        return plsh.Window(method.width[heads])
    if isinstance(method, plsh.PositionalLSH):
        if method.family is not None:
            raise TypeError(
                "heads are kept apart by their slopes, and this method carries a family; "
                "use BoundedCache(model, per_head=False)"
            )
        return replace(method, head_ids=(method.head_ids or tuple(range(count)))[heads])
    return method


def bandwidths(method: Method, slopes: Slopes) -> tuple[int, ...]:
    """Return for each head a distance that nothing seen exceeds."""
    if isinstance(method, plsh.Exact):
        return (UNLIMITED,) * len(slopes)
    if isinstance(method, plsh.Window):
        if isinstance(method.width, tuple):
            return method.width
        if method.width is not None:
            return (method.width,) * len(slopes)
        tol = 1e-6 if method.tol is None else method.tol
        return tuple(
            min(math.ceil(math.log(1 / tol) / m), UNLIMITED) if m else UNLIMITED for m in slopes
        )
    return _block_bandwidths(method, slopes)


@functools.lru_cache(maxsize=1024)
def _block_bandwidths(method: plsh.PositionalLSH, slopes: Slopes) -> tuple[int, ...]:
    ids = method.head_ids or tuple(range(len(slopes)))
    family = method.family
    if family is None:
        family = plsh.RandomBinning(tuple(1 / m if m else math.inf for m in slopes))
    found = StepWeight(family, method.samples, method.sampler, method.seed, ids).bandwidths
    # A block's width moves by a rounding of sigma to float32 at most.
    return tuple(min(width + 1 + width // 2**20, UNLIMITED) for width in found)
