"""Inputs found by gradient ascent against masks that were drawn before: the worst for them.

Rows of q and k have at most the norm at which a logit reaches `LOGIT`, rows of v at most 1; the
sum of squared errors of all rows is climbed by Adam, each step projected back.
"""

import math
from typing import Any

import numpy as np
import torch

from ..attention import attention
from ..methods import PositionalLSH
from .activations import Heads

LOGIT = 3.0
HEAD_DIM = 16
_RATE = 0.1


def random_limited(sigmas: tuple[int, ...], n: int, seed: int) -> Heads:
    """Return random directions, all rows of the largest norm that the adversary may use."""
    key = np.array([seed, 2], dtype=np.uint64)
    draw = np.random.Generator(np.random.Philox(key=key))
    arrays = draw.standard_normal((3, len(sigmas), n, HEAD_DIM))
    arrays /= np.linalg.norm(arrays, axis=-1, keepdims=True)
    q, k, v = arrays * np.array(_limits())[:, None, None, None]
    return Heads(q, k, v, tuple(1 / s for s in sigmas))


def _limits() -> tuple[float, float, float]:
    norm = math.sqrt(LOGIT * math.sqrt(HEAD_DIM))
    return norm, norm, 1.0


def worst(start: Heads, method: PositionalLSH, steps: int) -> Heads:
    """Climb from some inputs to ones on which lsh is far from exact ALiBi.

    Parameters
    ----------
    start : Heads
    method : PositionalLSH
        Whose masks are known.
    steps : int
    """
    tensors = [torch.tensor(x, requires_grad=True) for x in start[:3]]
    climb = torch.optim.Adam(tensors, lr=_RATE, maximize=True)
    options: dict[str, Any] = {"slopes": start.slopes, "causal": True}
    for _ in range(steps):
        climb.zero_grad()
        wrong = attention(*tensors, method=method, **options) - attention(
            *tensors, method="exact", **options
        )
        torch.autograd.backward(wrong.square().sum())
        climb.step()
        with torch.no_grad():
            for x, limit in zip(tensors, _limits(), strict=True):
                norm = x.norm(dim=-1, keepdim=True)
                x *= torch.clamp(limit / norm, max=1.0)
    q, k, v = (x.detach().numpy().copy() for x in tensors)
    return Heads(q, k, v, start.slopes)
