"""Real text as attention inputs: a fixed byte n-gram embedding, the same everywhere.

It stands in for a trained model where none may be needed: tokens that end the same n-grams get
similar queries and keys, logits are as spread as at the start of training, and text repeats
itself as text does.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .common import CliError

_STREAM = 0x706C7368  # "plsh": the Philox key of everything drawn here
_ORDERS = 3
_TABLE_BITS = 12
_FEATURES = 64

Float = npt.NDArray[np.float32]


class Text(NamedTuple):
    """Bytes as tokens, ``(length,)`` uint8, and what to tell the user of them."""

    tokens: npt.NDArray[np.uint8]
    note: str


def default_text() -> bytes:
    """Return the help topics that ship with Python, joined in the order of their names."""
    try:
        from pydoc_data import topics
    except ImportError:
        raise CliError("this Python ships without pydoc_data.topics; pass --text FILE") from None
    held: dict[str, str] = topics.topics
    return "\n".join(held[name] for name in sorted(held)).encode()


def load_text(path: Path | None, length: int) -> Text:
    """Return `length` bytes of a file, or of `default_text`; a shorter text is repeated."""
    if path is None:
        source, data = "pydoc_data.topics", default_text()
    else:
        source = str(path)
        try:
            with path.open("rb") as file:
                data = file.read(length)
        except OSError as error:
            raise CliError(f"cannot read --text {path}: {error.strerror}") from None
        if not data:
            raise CliError(f"--text {path} is empty")
    note = f"text: {source}"
    if len(data) < length:
        note += f", whose {len(data)} bytes are repeated to {length}"
    return Text(np.resize(np.frombuffer(data[:length], dtype=np.uint8), length), note)


def embed(tokens: npt.NDArray[np.uint8], heads: int, head_dim: int) -> tuple[Float, Float, Float]:
    """Return q, k, v of some tokens, each ``(1, heads, n, head_dim)`` float32.

    The byte 1-, 2- and 3-grams that end at a position are each hashed into a table of 2^12
    standard Gaussian vectors of 64 features (zeros stand before the text), and the three are
    added. Each head projects that sum by Gaussian matrices of its own for queries and keys, and
    scales each to the length ``sqrt(head_dim)``: so ``q . k / sqrt(head_dim)`` has a standard
    deviation of about 1. The value is the token's own Gaussian vector, one table of 256 a head.

    All numbers come from `numpy.random.Philox` under fixed keys, head h from a stream of its own:
    they depend neither on the length nor on the number of heads.

    Parameters
    ----------
    tokens : numpy.ndarray, shape (n,), uint8
        Bytes of text.
    heads, head_dim : int
        Sizes, >= 1.

    Returns
    -------
    tuple of numpy.ndarray
        q, k, v.

    Examples
    --------
    >>> q, k, v = embed(np.frombuffer(b"to be or not to be", np.uint8), heads=2, head_dim=4)
    >>> q.shape, bool((v[0, 0, 0] == v[0, 0, 13]).all())
    ((1, 2, 18, 4), True)
    """
    features = _features(tokens)
    q, k, v = (np.empty((1, heads, tokens.size, head_dim), dtype=np.float32) for _ in range(3))
    for h in range(heads):
        draw = _gaussians(1 + h)
        for x in (q, k):
            x[0, h] = features @ draw.standard_normal((_FEATURES, head_dim), dtype=np.float32)
        v[0, h] = draw.standard_normal((256, head_dim), dtype=np.float32)[tokens]
    for x in (q, k):
        x *= head_dim**0.5 / np.linalg.norm(x, axis=-1, keepdims=True)
    return q, k, v


def _features(tokens: npt.NDArray[np.uint8]) -> Float:
    """Add the vectors of the n-grams that end at each position: ``(n,) -> (n, 64)``."""
    tables = _gaussians(0).standard_normal((_ORDERS, 1 << _TABLE_BITS, _FEATURES), dtype=np.float32)
    total = np.zeros((tokens.size, _FEATURES), dtype=np.float32)
    gram = np.zeros(tokens.size, dtype=np.uint32)
    for order, table in enumerate(tables):
        earlier = np.concatenate([np.zeros(order, dtype=np.uint8), tokens])[: tokens.size]
        gram += earlier.astype(np.uint32) << np.uint32(8 * order)
        # Fibonacci hashing: the top bits of a product with 2^32 / golden ratio.
        total += table[(gram * np.uint32(2654435769)) >> np.uint32(32 - _TABLE_BITS)]
    return total


def _gaussians(stream: int) -> np.random.Generator:
    key = np.array([_STREAM, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))
