"""The NumPy backend of plsh: a single-pass band kernel on BLAS products of small tiles."""

from ._backend import BACKEND

__all__ = ["BACKEND"]
