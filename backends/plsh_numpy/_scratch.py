"""Memory that the kernel reuses."""

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

AnyArray: TypeAlias = npt.NDArray[Any]


class Scratch:
    """Memory of one thread, reused: the first touch of fresh pages costs milliseconds."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, np.dtype[Any]], AnyArray] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(held.nbytes for held in self._held.values())

    def get(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> AnyArray:
        """Return an array of undefined content, valid until the next call with that name."""
        size = math.prod(shape)
        held = self._held.get((name, dtype))
        if held is None or held.size < size:
            held = self._held[name, dtype] = np.empty(size, dtype=dtype)
        return held[:size].reshape(shape)
