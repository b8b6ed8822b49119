"""A small trained language model of bytes with ALiBi, by NumPy alone: true q, k, v to try.

`load` reads the weights that ship with plsh; `ByteModel.logits` leaves the attention to its
caller, so that the same model runs under every method and backend.
"""

from .cache import Cache, generate
from .model import Attend, ByteModel, load, quantise, save

__all__ = ["Attend", "ByteModel", "Cache", "generate", "load", "quantise", "save"]
