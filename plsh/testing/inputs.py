"""Seeded inputs made in NumPy: one source for tests, the conformance suite and benchmarks."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["AttentionInputs", "make_inputs", "round_to"]


class AttentionInputs(NamedTuple):
    """Inputs and cotangents of one call, NumPy; bfloat16 values come as float32.

    Attributes
    ----------
    q : ndarray, shape (B, H, Nq, D)
    k : ndarray, shape (B, Hkv, Nk, D)
    v : ndarray, shape (B, Hkv, Nk, Dv)
    grad_out : ndarray, shape (B, H, Nq, Dv)
        Of q's dtype.
    grad_lse : ndarray, shape (B, H, Nq)
        float32; float64 for float64.
    """

    q: npt.NDArray[Any]
    k: npt.NDArray[Any]
    v: npt.NDArray[Any]
    grad_out: npt.NDArray[Any]
    grad_lse: npt.NDArray[Any]


def make_inputs(
    batch: int | None = 2,
    heads: int = 4,
    kv_heads: int = 2,
    len_q: int = 64,
    len_k: int | None = None,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
    std: float = 1.0,
) -> AttentionInputs:
    """Draw normal q, k, v and cotangents.

    Parameters
    ----------
    batch : int or None, default 2
        None leaves the batch axis out.
    heads, kv_heads : int, default 4 and 2
    len_q : int, default 64
    len_k : int, optional
        None: `len_q`.
    head_dim : int, default 16
    value_dim : int, optional
        None: `head_dim`.
    dtype : {"float16", "bfloat16", "float32", "float64"}, default "float32"
        Every value is exact in it.
    seed : int, default 0
    std : float, default 1.0
        Standard deviation of q and k: logits have std**2 at the default scale.

    Returns
    -------
    AttentionInputs

    Raises
    ------
    ValueError
        `dtype` is another.

    Notes
    -----
    Spec: TST-1.

    Examples
    --------
    >>> make_inputs(2, 4, 2, 10, 12, 8).k.shape
    (2, 2, 12, 8)
    """
    rng = np.random.default_rng(seed)
    lead = () if batch is None else (batch,)
    len_k = len_q if len_k is None else len_k
    value_dim = head_dim if value_dim is None else value_dim

    def draw(*shape: int, std: float = 1.0) -> npt.NDArray[Any]:
        return round_to(std * rng.standard_normal((*lead, *shape)), dtype)

    return AttentionInputs(
        draw(heads, len_q, head_dim, std=std),
        draw(kv_heads, len_k, head_dim, std=std),
        draw(kv_heads, len_k, value_dim),
        draw(heads, len_q, value_dim),
        rng.standard_normal((*lead, heads, len_q)).astype(
            np.float64 if dtype == "float64" else np.float32
        ),
    )


def round_to(x: npt.ArrayLike, dtype: str) -> npt.NDArray[Any]:
    """Round to a dtype named; half to even. NumPy has no bfloat16: its values come as float32.

    Examples
    --------
    >>> float(round_to(1.01, "bfloat16"))
    1.0078125
    """
    if dtype != "bfloat16":
        if dtype not in ("float16", "float32", "float64"):
            raise ValueError(f"dtype must be float16, bfloat16, float32 or float64, got {dtype!r}")
        return np.asarray(x).astype(dtype)
    # A bfloat16 is the upper half of a float32. Infinity keeps its bits, NaN stays one.
    wide = np.asarray(x).astype(np.float32)
    bits = wide.view(np.uint32).astype(np.uint64)
    half, shift, one, upper = (np.uint64(n) for n in (0x7FFF, 16, 1, 0xFFFF0000))
    rounded = (bits + half + ((bits >> shift) & one)) & upper
    return np.where(np.isnan(wide), wide, rounded.astype(np.uint32).view(np.float32))
