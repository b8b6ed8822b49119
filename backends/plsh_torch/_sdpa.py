"""A drop-in for ``torch.nn.functional.scaled_dot_product_attention``, with linear biases."""

from typing import Any

import numpy as np
from torch import Tensor

import plsh


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    slopes: Any = None,
    method: str | Any = "window",
) -> Tensor:
    """Attention with linear biases under the signature of torch's own function.

    Parameters
    ----------
    query : Tensor, shape (..., H, L, E)
    key : Tensor, shape (..., Hkv, S, E)
    value : Tensor, shape (..., Hkv, S, Ev)
        Heads are the third axis from the end; there must be one. Any number of leading axes, the
        same in all three.
    attn_mask : None
        A dense mask is refused.
    dropout_p : float, default 0.0
        Anything but 0 is refused.
    is_causal : bool, default False
        Hide later keys. As torch does, the first query is at the first key, whatever the lengths.
        Distances are measured on the same axis.
    scale : float, optional
        Factor of the inner products. None: E**-0.5.
    enable_gqa : bool, default False
        Whether H may be a multiple of Hkv.
    slopes : array_like, shape (H,) or (B, H), optional
        Decay per token, >= 0. None: `plsh.alibi_slopes(H)`; 0.0 is torch's own function.
    method : {"window", "lsh", "exact"}, method object or PartitionSet, default "window"
        As for `plsh.attention`.

    Returns
    -------
    Tensor, shape (..., H, L, Ev)

    Raises
    ------
    TypeError
        `attn_mask` or `dropout_p` asks for what needs the L x S matrix.
    ValueError
        The heads differ and `enable_gqa` is not set; or an argument breaks a rule of
        `plsh.attention`.

    Notes
    -----
    Spec: ATT-1, ATT-12.

    Examples
    --------
    >>> import torch
    >>> q = torch.randn(2, 4, 10, 8)
    >>> scaled_dot_product_attention(q, q, q, is_causal=True, method="exact").shape
    torch.Size([2, 4, 10, 8])
    """
    if attn_mask is not None:
        raise TypeError(
            "attn_mask must be None: a dense mask is the L x S matrix that is never formed; pass "
            "is_causal=True, or padding and packed documents as segment_ids of plsh.attention"
        )
    if dropout_p != 0.0:
        raise TypeError(
            f"dropout_p must be 0, got {dropout_p}: dropping weights needs the L x S matrix; drop "
            "from the output instead, torch.nn.functional.dropout(out, p)"
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}")
        if x.is_nested:
            raise TypeError(
                f"{name} must be a dense tensor, got a nested one; pad it, and pass the padding as "
                "segment_ids of plsh.attention"
            )
        if x.ndim < 3:
            raise ValueError(f"{name} must have shape (..., H, L, E), got {tuple(x.shape)}")
    if query.shape[:-3] != key.shape[:-3] or key.shape[:-3] != value.shape[:-3]:
        raise ValueError(
            "query, key, value must have the same leading axes, got "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    if not isinstance(enable_gqa, bool | np.bool_):
        raise TypeError(f"enable_gqa must be a bool, got {enable_gqa!r}")
    if query.shape[-3] != key.shape[-3] and not enable_gqa:
        raise ValueError(
            f"query has {query.shape[-3]} heads and key has {key.shape[-3]}; "
            "pass enable_gqa=True if query heads share key heads"
        )
    lead = query.shape[:-3]
    if len(lead) > 1:
        query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    out: Tensor = plsh.attention(
        query,
        key,
        value,
        method=method,
        slopes=slopes,
        causal=is_causal,
        scale=scale,
        q_offset=0,
    )
    return out.reshape(*lead, *out.shape[-3:]) if len(lead) > 1 else out
