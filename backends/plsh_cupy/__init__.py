"""The CuPy backend of plsh: raw CUDA kernels of the single-pass band, for CuPy and torch arrays."""

from ._backend import BACKEND

__all__ = ["BACKEND"]
