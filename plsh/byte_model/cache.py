"""Decoding token by token with a KV cache that holds no more than a head can see."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import compat
from ..attention import attention
from ..hashing import Seed, check_seed, fold_seed
from ..methods import resolve
from ..validation import check_flag
from .model import BYTES, ByteModel, Float, as_bytes


class Cache:
    """Keys and values of each layer, the positions that no head still sees cut off.

    It attends for `ByteModel.logits`: new tokens at `position` on, keys from `k_offset` on.

    Parameters
    ----------
    model : ByteModel
    method : str or method object
        As for `ByteModel.attention`.
    trim : bool, default True
        False keeps all keys, to compare with.
    options
        For `plsh.attention`, such as ``backend="numpy"``.

    Attributes
    ----------
    position : int
        Of the next token.

    Raises
    ------
    TypeError, ValueError
        As for `ByteModel.attention`; the positions of the tokens can't be chosen either.
    """

    def __init__(self, model: ByteModel, method: Any, trim: bool = True, **options: Any) -> None:
        self.model, self.options = model, options
        self._calls = model.calls(method, options, "q_offset", "k_offset")
        reach = [
            max(resolve(call["method"], None, model.slopes, model.heads).weight.bandwidths)
            for call in self._calls
        ]
        self._reach = reach if check_flag("trim", trim) else [None] * model.layers
        self._keys: list[Any] = [None] * model.layers
        self._values: list[Any] = [None] * model.layers
        self.position = 0

    def logits(self, tokens: Any) -> Float:
        """Return the model's logits of the tokens that come next, ``(n, 256)``."""
        logits = self.model.logits(tokens, self._attend)
        self.position += len(logits)
        return logits

    def _attend(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        if self._keys[layer] is not None:
            k = np.concatenate([self._keys[layer], k], axis=2)
            v = np.concatenate([self._values[layer], v], axis=2)
        end = self.position + q.shape[2]
        out = attention(
            q,
            k,
            v,
            **self._calls[layer],
            q_offset=self.position,
            k_offset=end - k.shape[2],
            **self.options,
        )
        reach = self._reach[layer]
        kept = k.shape[2] if reach is None else min(k.shape[2], reach)  # what position `end` sees
        self._keys[layer] = k[:, :, k.shape[2] - kept :].copy()
        self._values[layer] = v[:, :, v.shape[2] - kept :].copy()
        return out

    @property
    def tokens(self) -> int:
        """How many positions the longest layer holds."""
        return max(0 if k is None else int(k.shape[2]) for k in self._keys)

    @property
    def bytes(self) -> int:
        """How much memory keys and values take."""
        return sum(x.nbytes for x in (*self._keys, *self._values) if x is not None)


def generate(
    cache: Cache, prompt: Any, count: int, temperature: float = 0.8, seed: Seed = 0
) -> Iterator[int]:
    """Continue a text, byte by byte.

    Parameters
    ----------
    cache : Cache
        Empty, or of the text before the prompt.
    prompt : bytes or array_like of int, shape (n,)
        At least one byte.
    count : int
        Bytes to draw, >= 0.
    temperature : float
        Finite and >= 0; 0 takes the likeliest byte.
    seed : int or tuple of int
        Of the draws, in ``[0, 2**64)``.

    Returns
    -------
    iterator of int
        The bytes that follow the prompt.

    Raises
    ------
    TypeError, ValueError
        An argument breaks a rule above; the message names it.

    Examples
    --------
    >>> from plsh.byte_model import load
    >>> len(bytes(generate(Cache(load(), "window"), b"import ", 3)))
    3
    """
    tokens = as_bytes("prompt", prompt)
    if not tokens.size:
        raise ValueError("prompt must have a byte or more, got none")
    steps = compat.as_int(count)
    if steps is None:
        raise TypeError(f"count must be an integer, got {count!r}")
    if steps < 0:
        raise ValueError(f"count must be >= 0, got {steps}")
    heat = compat.as_python(temperature)
    if isinstance(heat, bool) or not isinstance(heat, int | float):
        raise TypeError(f"temperature must be a number, got {temperature!r}")
    if not 0 <= heat < math.inf:
        raise ValueError(f"temperature must be a finite number >= 0, got {temperature!r}")
    return _draws(cache, tokens, steps, heat, fold_seed(check_seed(seed)))


def _draws(cache: Cache, prompt: Any, count: int, temperature: float, seed: int) -> Iterator[int]:
    draw = np.random.Generator(np.random.Philox(key=np.array([seed, 0], dtype=np.uint64)))
    logits = cache.logits(prompt)[-1]
    for left in range(count, 0, -1):
        if temperature == 0:
            token = int(np.argmax(logits))
        else:
            with np.errstate(over="ignore"):  # the coldest leave the likeliest alone
                scaled = (logits - logits.max()).astype(np.float64) / temperature
            chance = np.exp(scaled)
            token = int(draw.choice(BYTES, p=chance / chance.sum()))
        yield token
        if left > 1:
            logits = cache.logits(bytes([token]))[-1]
