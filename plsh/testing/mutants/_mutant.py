"""What a mutant is, and the decorator that makes one of a class."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from plsh.backend import Request
from plsh.testing.model import ModelBackend

__all__ = ["KINDS", "Mutant", "OneSample", "changed", "collector"]

KINDS = (
    "positions", "blocks", "weights", "pooling", "heads", "tiles", "precision", "masks", "options",
    "gradients", "state", "types", "errors", "memory",
)  # fmt: skip
"""What mutants are about."""

_Backend = TypeVar("_Backend", bound=type[ModelBackend])


@dataclass(frozen=True, slots=True)
class Mutant:
    """A backend with one fault.

    Attributes
    ----------
    name : str
        Of the backend, an identifier.
    kind : str
        What it is about, one of `KINDS`.
    fault : str
        One sentence.
    killers : tuple of str
        Requirements of the standard that must fail, the sharpest first.
    backend : ModelBackend
        The faulty backend.
    """

    name: str
    kind: str
    fault: str
    killers: tuple[str, ...]
    backend: ModelBackend


def collector(mutants: list[Mutant]) -> Callable[..., Callable[[_Backend], _Backend]]:
    """Return a decorator ``(kind, *killers)`` that makes a mutant of a class and lists it.

    Its name is that of the class, its fault the docstring.
    """

    def mutant(kind: str, *killers: str) -> Callable[[_Backend], _Backend]:
        def add(cls: _Backend) -> _Backend:
            cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
            mutants.append(Mutant(cls.name, kind, cls.__doc__ or "", killers, cls()))
            return cls

        return add

    return mutant


def changed(request: Request, **operands: Any) -> Request:
    """Return the request with other operands."""
    return replace(request, arrays=replace(request.arrays, **operands))


class OneSample(ModelBackend):
    """The model on one of the partitions alone: a part of some mutants."""

    def __init__(self, sample: int) -> None:
        self.sample = sample

    def labels(self, request: Request, start: int, n: int, h: int) -> Any:
        """Return the labels of the one partition, ``(1, n)``."""
        return super().labels(request, start, n, h)[self.sample : self.sample + 1]
