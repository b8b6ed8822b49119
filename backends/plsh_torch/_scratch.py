"""Memory that the kernel reuses."""

import math
from collections import deque

import torch
from torch import Tensor

KEPT = 1 << 25
"""Bytes of scratch memory that are kept between calls, at most."""


class Scratch:
    """Memory of one call, reused: the first touch of fresh pages costs milliseconds."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(held.nbytes for held in self._held.values())

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of undefined content, valid until the next call with that name."""
        size = math.prod(shape)
        held = self._held.get((name, dtype))
        if held is None or held.numel() < size:
            with torch.inference_mode(False):  # what is made there can't be written elsewhere
                held = self._held[name, dtype] = torch.empty(size, dtype=dtype, device="cpu")
        return held[:size].view(shape)


_FREE: deque[Scratch] = deque(maxlen=2)
"""Scratch memory that no thread uses now; the autograd engine may run beside the caller."""


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
