"""The attention interface: the functions behind the names `plsh`, `plsh_window`, `plsh_exact`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

import plsh

from ._mask import Visible, visible
from ._settings import KINDS, Method, Slopes, bandwidths, narrowed, of_heads, plan_of

NATIVE = "plsh_native"
"""Name of the mask alone, for models whose attention is switched module by module."""

_HARMLESS = {
    "cache",
    "is_causal",
    "labels",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "sliding_window",
    "use_cache",
}
"""Keywords that models pass on, and that are honoured or mean nothing to attention."""


class KeyHeads(NamedTuple):
    """Keys or values of a cache that keeps less of some heads than of others.

    Parameters
    ----------
    parts : tuple of Tensor
        ``(B, heads of the part, Nk of the part, D)``, in the order of the heads.
    """

    parts: tuple[Tensor, ...]


def register() -> None:
    """Register `plsh` (lsh), `plsh_window` and `plsh_exact` with transformers.

    Both as attention and as mask function, so that
    ``from_config(config, attn_implementation="plsh_window")``, ``from_pretrained`` and
    ``model.set_attn_implementation`` take the names. Each computes ALiBi attention with the
    standard slopes, beside what positions the model has of its own (RoPE); `switch` says it
    otherwise. Calling again changes nothing.

    Notes
    -----
    Spec: ATT-1, HSH-2. Under lsh layer l draws its blocks from seed (0, l).

    Examples
    --------
    >>> register()
    >>> from transformers import AttentionInterface
    >>> "plsh_window" in AttentionInterface().valid_keys()
    True
    """
    for name in KINDS:
        AttentionInterface.register(name, _named(name))
        AttentionMaskInterface.register(name, visible)
    AttentionMaskInterface.register(NATIVE, visible)


def _named(name: str) -> Callable[..., tuple[Tensor, None]]:
    def attend(
        module: Any,
        query: Tensor,
        key: Any,
        value: Any,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        return _attend(
            module, query, key, value, attention_mask, scaling, dropout, name, keywords
        ), None

    attend.__name__ = attend.__qualname__ = name
    return attend


def _attend(
    module: Any,
    query: Tensor,
    key: Any,
    value: Any,
    mask: Any,
    scale: float | None,
    dropout: float,
    name: str,
    keywords: dict[str, Any],
) -> Tensor:
    """Return the output ``(B, N, H, D)`` of a call through the library's interface."""
    refuse(dropout, keywords.get("output_attentions"))
    for word, given in keywords.items():
        if word not in _HARMLESS and given is not None and given is not False:
            raise TypeError(
                f"plsh can't honour {word}, which this model passes to its attention; use "
                "attn_implementation='sdpa' or 'eager'"
            )
    if mask is None:
        causal = keywords.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        mask = Visible(None, None, _length(key), None, bool(causal), None)
    check_positions(keywords.get("position_ids"), mask, query.shape[-2])
    window = keywords.get("sliding_window")
    if window is not None:
        mask = mask._replace(window=window if mask.window is None else min(window, mask.window))
    return attend(plan_of(module, name), query, key, value, mask, scale)


def refuse(dropout: float, output_attentions: Any) -> None:
    """Refuse what needs the N x N matrix."""
    if dropout:
        raise TypeError(
            f"plsh drops no attention weights (got dropout {dropout}): that needs the N x N "
            "matrix; set the config's attention dropout to 0, or call model.eval()"
        )
    if output_attentions:
        raise TypeError(
            "plsh forms no attention weights, so output_attentions must be False; use "
            "attn_implementation='eager' to look at them"
        )


def check_positions(positions: Any, mask: Any, queries: int) -> None:
    """Refuse positions that restart where the mask sees one document.

    The library finds packed documents only where it is given neither a mask nor a cache.
    """
    if positions is None or positions.ndim != 2 or queries < 2 or torch.compiler.is_compiling():
        return
    if not isinstance(mask, Visible) or positions.shape[-1] != queries:
        return
    restarts = positions.diff(dim=-1) != 1
    if mask.ids is not None:
        if isinstance(mask.stop, Tensor):
            return
        ids = mask.ids[:, mask.stop - queries : mask.stop]
        restarts = restarts & (ids[:, 1:] >= 0) & (ids[:, 1:] == ids[:, :-1])
    if bool(restarts.any()):
        raise ValueError(
            "position_ids must grow by 1 from token to token of a document; for packed documents "
            "pass them without attention_mask and with use_cache=False"
        )


def attend(
    plan: tuple[Method, Slopes | None],
    query: Tensor,
    key: Any,
    value: Any,
    mask: Any,
    scale: float | None,
) -> Tensor:
    """Return the output ``(B, N, H, D)`` of queries ``(B, H, N, D)`` under a `Visible`."""
    if not isinstance(mask, Visible):
        raise TypeError(
            f"attention_mask must have shape (batch, tokens), got a dense one ({_kind(mask)}): "
            "that is the N x N mask that plsh never forms; use attn_implementation='sdpa'"
        )
    if not isinstance(key, KeyHeads):
        return _attend_heads(plan, query, key, value, mask, scale)
    heads = query.shape[1]
    group = heads // sum(part.shape[1] for part in key.parts)
    method, slopes = plan
    slopes = default_slopes(heads) if slopes is None else slopes
    made, start = [], 0
    for k, v in zip(key.parts, value.parts, strict=True):
        own = slice(start, start + group * k.shape[1])
        part = of_heads(method, own, heads), slopes[own]
        made.append(_attend_heads(part, query[:, own], k, v, mask, scale))
        start = own.stop
    return torch.cat(made, dim=2)


def _attend_heads(
    plan: tuple[Method, Slopes | None],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Visible,
    scale: float | None,
) -> Tensor:
    method, slopes = plan
    rows, heads, queries, _ = query.shape
    keys = key.shape[-2]
    first_query = mask.stop - queries
    first_key = 0 if mask.slots is not None else mask.stop - keys
    if mask.window is not None and not (isinstance(mask.stop, int) and mask.stop <= mask.window):
        if isinstance(method, plsh.PositionalLSH):
            raise TypeError(
                f"plsh can't cut blocks of lsh at the model's sliding window of {mask.window} "
                f"tokens, got {mask.stop}; set config.sliding_window = None, or use 'plsh_window'"
            )
        slopes = default_slopes(heads) if slopes is None else slopes
        method = narrowed(method, slopes, mask.window - 1)
    if isinstance(first_key, int) and first_key > 0:
        _check_kept(method, slopes, heads, keys - queries)
    segments = None
    if mask.ids is not None:
        if isinstance(first_query, Tensor):
            at = first_query + torch.arange(queries, device=query.device)
            segments = mask.ids[:, at], mask.ids
        else:
            segments = mask.ids[:, first_query : mask.stop], mask.ids[:, first_key : mask.stop]
            if mask.slots is not None:
                segments = segments[0], mask.ids
    if isinstance(first_query, Tensor):
        first_query = first_query.expand(rows)
    if mask.pad is not None:
        first_query, first_key = first_query - mask.pad, first_key - mask.pad
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    out: Tensor = plsh.attention(
        query,
        key,
        value,
        method=method,
        slopes=slopes,
        causal=mask.causal,
        scale=scale,
        q_offset=first_query,
        k_offset=first_key,
        segment_ids=segments,
    )
    return out.transpose(1, 2).contiguous()


def default_slopes(heads: int) -> Slopes:
    """Return the standard slopes as numbers."""
    return tuple(float(m) for m in plsh.alibi_slopes(heads))


def _check_kept(method: Method, slopes: Slopes | None, heads: int, kept: int) -> None:
    """Refuse a cache that has dropped keys which this method sees."""
    reach = max(bandwidths(method, default_slopes(heads) if slopes is None else slopes))
    if reach > kept:
        raise ValueError(
            f"the cache keeps {kept} tokens and {method!r} sees {reach}: make the cache for the "
            "method that reads it, BoundedCache(model) after switch(model, …)"
        )


def _length(key: Any) -> int:
    return int((key.parts[0] if isinstance(key, KeyHeads) else key).shape[-2])


def _kind(mask: Any) -> str:
    return f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
