"""Memory that the kernel reuses."""

import math
import os
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

KEPT = 1 << 25
"""Bytes of the scratch memory of one processor that are kept between calls, at most."""


VIEWS = 1 << 8
"""Views of it that are kept, at most."""


INTEGERS = {2: np.int16, 4: np.int32, 8: np.int64}


def fresh(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a new tensor of undefined content.

    By NumPy, which asks for large pages: their first touch costs a third.
    """
    return torch.from_numpy(np.empty(tuple(shape), INTEGERS[dtype.itemsize])).view(dtype)


class Scratch:
    """Memory of one thread, reused: the first touch of fresh pages costs milliseconds."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}
        self._views: dict[tuple[str, torch.dtype, tuple[int, ...]], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(held.nbytes for held in self._held.values())

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of undefined content, valid until the next call with that name."""
        view = self._views.get((name, dtype, shape))
        if view is not None:
            return view
        size = math.prod(shape)
        held = self._held.get((name, dtype))
        # What is made in inference mode can't be written elsewhere.
        with torch.inference_mode(False):
            if held is None or held.numel() < size:
                held = self._held[name, dtype] = torch.empty(size, dtype=dtype, device="cpu")
                self._views.clear()
            if len(self._views) >= VIEWS:
                self._views.clear()
            view = self._views[name, dtype, shape] = held[:size].view(shape)
        return view


_FREE: deque[Scratch] = deque(maxlen=os.cpu_count())
"""Scratch memory that no thread uses now."""


def borrow() -> Scratch:
    """Take scratch memory that nobody else uses."""
    try:
        return _FREE.pop()
    except IndexError:
        return Scratch()


def give_back(scratch: Scratch) -> None:
    """Keep scratch memory for the next call, unless it is large."""
    if scratch.nbytes <= KEPT:
        _FREE.append(scratch)
