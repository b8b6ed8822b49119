"""Segment ids: the one mechanism for padding and packed documents."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import compat
from .compat import Array

__all__ = ["segments_from_lengths"]


def segments_from_lengths(lengths: Any, n: int) -> Array:
    """Return segment ids of rows that hold one document, or several packed one after another.

    Parameters
    ----------
    lengths : array_like of int, shape (B,) or (B, documents)
        Tokens of each row's document, or of each of its documents in order; 0 is allowed. Rows of
        several may be ragged if given as nested sequences.
    n : int
        Length of the rows. Positions after the last document are padding.

    Returns
    -------
    Array, shape (B, n), int32
        Number of the document within its row, -1 for padding. NumPy for sequences, else of the kind
        and device of `lengths`, whose values are then not read and not checked.

    Raises
    ------
    TypeError
        `lengths` are not integers, or `n` is not.
    ValueError
        A length is negative, a row is longer than `n`, or the shape is another.

    Notes
    -----
    Spec: ATT-28.

    Examples
    --------
    >>> segments_from_lengths([[2, 1], [4]], 5).tolist()
    [[0, 0, 1, -1, -1], [0, 0, 0, 0, -1]]
    """
    if compat.as_int(n) is None:
        raise TypeError(f"n must be an integer, got {n!r}")
    if n < 0:
        raise ValueError(f"n must be >= 0, got {n}")
    if compat.kind(lengths) not in ("", "numpy"):
        return _from_array(lengths, n)
    if isinstance(lengths, np.ndarray) and lengths.ndim not in (1, 2):
        raise ValueError(f"lengths must have shape (B,) or (B, documents), got {lengths.shape}")
    rows = lengths.tolist() if isinstance(lengths, np.ndarray) else lengths
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        raise TypeError(f"lengths must be a sequence of ints, or one of sequences, got {lengths!r}")
    ids = np.full((len(rows), n), -1, dtype=np.int32)
    for row, documents in zip(ids, rows, strict=True):
        parts = documents if isinstance(documents, Sequence) else [documents]
        for part in parts:
            if compat.as_int(part) is None:
                raise TypeError(f"lengths must be integers, got {part!r}")
            if part < 0:
                raise ValueError(f"lengths must be >= 0, got {part}")
        total = sum(parts)
        if total > n:
            raise ValueError(f"lengths of a row must add up to at most n = {n}, got {total}")
        row[:total] = np.repeat(np.arange(len(parts)), parts)
    return ids


def _from_array(lengths: Array, n: int) -> Array:
    if not compat.dtype_name(lengths).startswith(("int", "uint")):
        raise TypeError(f"lengths must be integers, got dtype {lengths.dtype}")
    if lengths.ndim not in (1, 2):
        raise ValueError(f"lengths must have shape (B,) or (B, documents), got {lengths.shape}")
    xp, device = compat.namespace(lengths), compat.device(lengths)
    documents = xp.astype(lengths[:, None] if lengths.ndim == 1 else lengths, xp.int32)
    at = xp.arange(n, dtype=xp.int32, device=device)[None, :]
    # The document of a position is the number of documents that end at or before it.
    end = xp.zeros((documents.shape[0], 1), dtype=xp.int32, device=device)
    ids = xp.zeros((documents.shape[0], n), dtype=xp.int32, device=device)
    for document in range(documents.shape[1]):
        end = end + documents[:, document : document + 1]
        ids = ids + xp.astype(end <= at, xp.int32)
    return xp.where(ids < documents.shape[1], ids, xp.full_like(ids, -1))
