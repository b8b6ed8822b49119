"""Drop-in attention for Flax, and `jax.nn.dot_product_attention` with slopes.

Both take ``(…, N, H, D)``. What they cannot honour they refuse, with the reason and the remedy.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import plsh
from plsh import compat

__all__ = ["attention_fn", "dot_product_attention"]

_DENSE = "the n x n matrix that it needs is never formed"


def attention_fn(
    method: Any = "lsh",
    *,
    slopes: Any = None,
    causal: bool = False,
    scale: float | None = None,
) -> Callable[..., Any]:
    """Return an ``attention_fn`` for ``MultiHeadAttention`` of Flax, nnx or linen.

    Parameters
    ----------
    method, slopes, causal, scale
        As for `plsh.attention`. Causality is given here, not as a mask.

    Returns
    -------
    callable
        ``f(query, key, value, bias=None, mask=None, …)`` of ``(batch…, N, H, D)`` arrays. Of the
        keywords that Flax passes it refuses those that ask for what it does not do: a bias, a mask,
        dropout, sown weights. A dtype casts query, key and value; a precision is refused unless it
        is that of the backend, which computes float32 in float32.

    Raises
    ------
    TypeError
        By the function: an argument cannot be honoured.

    Notes
    -----
    Rows that see no key are 0; Flax's own function gives them the mean of the values.

    Examples
    --------
    >>> import plsh_jax
    >>> f = plsh_jax.attention_fn("window", causal=True)
    """

    def attend(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = True,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        is_causal: bool = False,
        **others: Any,
    ) -> Any:
        _refuse("bias", bias, f"{_DENSE}; use slopes=")
        _refuse(
            "mask",
            mask,
            f"{_DENSE}; use attention_fn(causal=True), and decode by plsh.attention(…, q_offset=…)",
        )
        _refuse("module", module, "attention weights are never formed, so none can be sown")
        for name, own in (
            ("einsum_dot_general", einsum_dot_general),
            ("qk_attn_weights_einsum", qk_attn_weights_einsum),
            ("attn_weights_value_einsum", attn_weights_value_einsum),
        ):
            _refuse(name, own, "the products are the kernel's own; leave it None")
        for name, own in others.items():
            _refuse(name, own, "it is not known here; leave it None")
        if not (isinstance(deterministic, bool) and deterministic) and not (
            isinstance(dropout_rate, int | float) and dropout_rate == 0
        ):
            raise TypeError(
                f"dropout_rate must be 0, got {dropout_rate!r}: {_DENSE}; drop out the output"
            )
        _check_precision(precision)
        if dtype is not None:
            query, key, value = (x.astype(dtype) for x in (query, key, value))
        lead = query.shape[:-3]
        query, key, value = (x.reshape(-1, *x.shape[len(lead) :]) for x in (query, key, value))
        offset = None if query.shape[1] == key.shape[1] else 0
        if offset is not None and (causal or is_causal):
            raise TypeError(
                f"causal attention of {query.shape[1]} queries to {key.shape[1]} keys does not say "
                "where the queries stand; call plsh.attention with q_offset="
            )
        out = plsh.attention(
            query, key, value, method=method, slopes=slopes, causal=causal or is_causal,
            scale=scale, q_offset=offset, layout="bshd",
        )  # fmt: skip
        return out.reshape(*lead, *out.shape[1:])

    return attend


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    implementation: Any = None,
    return_residual: bool = False,
    slopes: Any = None,
    method: Any = None,
) -> Any:
    """`jax.nn.dot_product_attention` under a positional weight.

    Parameters
    ----------
    query : jax.Array, shape (B, T, N, H) or (T, N, H)
    key, value : jax.Array, shape (B, S, K, H) or (S, K, H)
        N is a multiple of K.
    bias, mask
        Refused: see `slopes`, `is_causal` and the lengths.
    scale : float, optional
        None: H**-0.5.
    is_causal : bool, default False
        Query i sees the keys up to i (top-left, as in jax.nn).
    query_seq_lengths, key_value_seq_lengths : int array (B,), optional
        What stands after is padding: it is not seen, and its rows are 0. From 0 to T, and to S,
        which is checked where they are numbers or a NumPy array.
    local_window_size : int or (int, int), optional
        The keys seen before and after each query; two different sizes are refused. It makes
        `method` ``Window(size)``.
    implementation
        None; any other is refused.
    return_residual : bool, default False
        Also return the lse ``(B, T, N)``.
    slopes : array_like, shape (N,) or (B, N), optional
        As for `plsh.attention`.
    method : str or method object, optional
        As for `plsh.attention`; None: "lsh", or the window.

    Returns
    -------
    jax.Array, shape (B, T, N, H), or a pair of it and the lse
        Rows that see no key are 0.

    Raises
    ------
    TypeError, ValueError
        An argument cannot be honoured, or breaks a rule of `plsh.attention`.

    Examples
    --------
    >>> import jax.numpy as jnp, plsh_jax
    >>> q = jnp.ones((2, 5, 4, 8))
    >>> plsh_jax.dot_product_attention(q, q, q, is_causal=True, method="exact").shape
    (2, 5, 4, 8)
    """
    _refuse("bias", bias, f"{_DENSE}; use slopes=")
    _refuse(
        "mask", mask, f"{_DENSE}; use is_causal=, query_seq_lengths= and key_value_seq_lengths="
    )
    _refuse("implementation", implementation, "the kernel is chosen by plsh; leave it None")
    if local_window_size is not None:
        if method is not None:
            raise TypeError("give method or local_window_size, not both")
        method = plsh.Window(_window(local_window_size, is_causal))
    for name, x in (("query", query), ("key", key)):
        if getattr(x, "ndim", 0) not in (3, 4):
            raise ValueError(f"{name} must have shape (B, T, N, H) or (T, N, H), got {x!r:.80}")
    ids = None
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        batched = query.ndim == 4
        rows = query.shape[0] if batched else 1
        pair = [
            _ids("query_seq_lengths", query_seq_lengths, rows, query.shape[-3]),
            _ids("key_value_seq_lengths", key_value_seq_lengths, rows, key.shape[-3]),
        ]
        ids = tuple(x if batched else x[0] for x in pair)
    found = plsh.attention(
        query, key, value, method="lsh" if method is None else method, slopes=slopes,
        causal=is_causal, scale=scale, q_offset=0, k_offset=0, segment_ids=ids, layout="bshd",
        return_lse=return_residual,
    )  # fmt: skip
    return (found.out, jnp.swapaxes(found.lse, -1, -2)) if return_residual else found


def _refuse(name: str, value: Any, reason: str) -> None:
    if value is not None and value is not False:
        raise TypeError(f"{name} must be None: {reason}")


def _check_precision(precision: Any) -> None:
    """Let the precision pass that the kernel has."""
    if precision is None:
        return
    if jax.lax.Precision(precision) is not jax.lax.Precision.HIGHEST:
        raise TypeError(
            f"precision must be None or HIGHEST, which is what the kernel computes in, "
            f"got {precision!r}"
        )


def _window(size: Any, is_causal: bool) -> int:
    pair = size if isinstance(size, tuple | list) else (size, size)
    sizes = [n for n in map(compat.as_int, pair) if n is not None]
    if not len(pair) == len(sizes) == 2:
        raise TypeError(f"local_window_size must be an int or a pair of ints, got {size!r}")
    before, after = sizes
    if not is_causal and before != after:
        raise ValueError(
            f"local_window_size must be one size for both sides, got {size!r}: a weight depends on "
            "the distance alone; with is_causal the keys after the query are hidden"
        )
    return before


def _ids(name: str, lengths: Any, rows: int, size: int) -> Any:
    """Return segment ids ``(rows, size)``: 0, or -1 behind the length."""
    if lengths is None:
        return jnp.zeros((rows, size), jnp.int32)
    known = not any(isinstance(x, jax.Array) for x in jax.tree.leaves(lengths))
    lengths = np.asarray(lengths) if known else jnp.asarray(lengths)
    if lengths.shape != (rows,):
        raise ValueError(f"{name} must have shape ({rows},), got {lengths.shape}")
    if lengths.size and not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got dtype {lengths.dtype}")
    if known and isinstance(size, int) and not np.all((lengths >= 0) & (lengths <= size)):
        raise ValueError(f"{name} must lie from 0 to {size}, got {lengths.tolist()}")
    lengths = jnp.asarray(lengths, dtype=jnp.int32)
    return jnp.where(jnp.arange(size) < lengths[:, None], 0, -1).astype(jnp.int32)
