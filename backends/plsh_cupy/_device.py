"""What the host side asks of a device: memory, launches, limits. CuPy, torch, or an emulator."""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from plsh.compat import Array

from ._params import Strided
from ._plan import Launch, Limits

__all__ = ["Device"]


class Device(Protocol):
    """The device of one call, with the stream that the caller works on."""

    @property
    def key(self) -> Hashable:
        """Device and stream: what a table uploaded here may be reused on."""

    limits: Limits
    """What a launch may ask for."""
    capturing: bool
    """Whether the stream records a graph, so that nothing may be read back."""

    def locate(self, x: Array) -> Strided:
        """Return address and strides of an array that lives here."""

    def empty(self, shape: Sequence[int], dtype: str) -> Array:
        """Allocate a C-contiguous array of the caller's kind."""

    def upload(self, x: npt.NDArray[Any]) -> Array:
        """Copy a host array here, in the order of the stream."""

    def hold(self, owner: Array, arrays: Sequence[Array]) -> None:
        """Keep arrays as long as `owner` lives: a recorded graph needs its temporaries again."""

    def run(self, launch: Launch, params: npt.NDArray[Any]) -> None:
        """Launch a kernel on the stream."""
