"""The mask interface: what a token may see, in O(N), in place of an N x N mask."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function


class Visible(NamedTuple):
    """What the attention function is handed as attention mask.

    Parameters
    ----------
    ids : Tensor, shape (B, L), optional
        Document of each token seen so far, -1 for padding; None: one document, no padding.
    pad : Tensor, shape (B,), optional
        Padding to the left of each row. Positions count from the first token after it, so that a
        padded row has the positions, and under lsh the blocks, of the row alone.
    stop : int or Tensor
        Tokens seen so far, the queries included.
    slots : int, optional
        Keys of a static cache, whose first slot is token 0; None: keys end at `stop`.
    causal : bool
    window : int, optional
        The model's sliding window: tokens seen, the query itself included.
    """

    ids: Tensor | None
    pad: Tensor | None
    stop: int | Tensor
    slots: int | None
    causal: bool
    window: int | None

    @property
    def ndim(self) -> int:
        """Tell the library that this is no mask of padding (2)."""
        return 0

    def to(self, *args: Any, **keywords: Any) -> "Visible":
        """Stay as it is: MPT casts its mask to bool."""
        return self


def visible(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Any = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: Any = "cpu",
    **keywords: Any,
) -> Visible:
    """Say what the tokens may see; the arguments are those of the library's mask interface.

    Raises
    ------
    TypeError
        The pattern is neither causal nor bidirectional, sliding or packed.
    ValueError
        The mask doesn't cover the tokens, or has padding between tokens of a row.
    """
    if isinstance(attention_mask, Visible):  # generate made it beforehand
        return attention_mask
    if use_vmap:
        raise TypeError(
            "plsh takes no mask functions of the caller's own: a pattern of any form is the "
            "N x N mask that is never formed; use attn_implementation='sdpa' or 'flex_attention'"
        )
    if local_size is not None and getattr(config, "attention_chunk_size", None) is not None:
        raise TypeError(
            "plsh computes no chunked attention; use attn_implementation='sdpa' for this model"
        )
    stop = q_offset + q_length
    is_static = isinstance(stop, Tensor) or kv_offset + kv_length != stop
    if is_static and local_size is not None:
        raise TypeError(
            "plsh takes no static cache of a sliding window, whose slots are out of order; use "
            "the default cache"
        )
    slots = kv_length if is_static else None
    causal = mask_function is not bidirectional_mask_function
    if attention_mask is not None:
        if slots is not None and attention_mask.shape[-1] < slots:  # no token is there yet
            room = slots - attention_mask.shape[-1]
            attention_mask = torch.nn.functional.pad(attention_mask, (0, room))
        ids, pad = _padding(attention_mask, slots or int(stop))
        return Visible(ids, pad, stop, slots, causal, local_size)
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return Visible(None, None, stop, slots, causal, local_size)
    if is_static or q_offset or kv_length != q_length:  # packed rows come without a cache
        return Visible(None, None, stop, slots, causal, local_size)
    ids = _documents(mask_function, batch_size, q_length, device)
    return Visible(ids, None, stop, slots, causal, local_size)


def _padding(mask: Tensor, length: int) -> tuple[Tensor | None, Tensor | None]:
    """Return ids and left padding of a mask ``(B, L)`` that is true at tokens."""
    if mask.shape[-1] != length:
        raise ValueError(
            f"attention_mask must cover the {length} tokens seen so far, those of the cache "
            f"included, got {mask.shape[-1]}"
        )
    begins = mask.clone()
    begins[:, 1:] &= ~mask[:, :-1]
    whole = (begins.sum(-1) <= 1).all()
    message = "attention_mask must have no padding between the tokens of a row; pad on the left"
    if torch.compiler.is_compiling():
        torch._assert_async(whole, message)
    else:
        if not bool(whole):
            raise ValueError(message)
        if bool(mask.all()):
            return None, None
    # A row of padding only keeps its positions.
    return mask.to(torch.int32) - 1, mask.to(torch.int32).argmax(-1)


def _documents(mask_function: Any, rows: int, length: int, device: Any) -> Tensor | None:
    """Return the document of each token of packed rows, read off the mask function in O(N).

    A token that doesn't see the one before it begins a document. That later tokens are hidden is
    checked, since only then this says it all.
    """
    batch = torch.arange(rows, device=device)[:, None]
    head = torch.zeros((1, 1), dtype=torch.long, device=device)
    after = torch.arange(1, length, device=device)[None]
    joined = mask_function(batch, head, after, after - 1).expand(rows, length - 1)
    if not torch.compiler.is_compiling():
        if bool(mask_function(batch, head, after - 1, after).any()):
            raise TypeError(
                "plsh takes causal masks, sliding or packed, and bidirectional ones; this model's "
                "shows some later tokens; use attn_implementation='sdpa'"
            )
        if bool(joined.all()):
            return None
    return torch.nn.functional.pad((~joined).to(torch.int32).cumsum(-1, dtype=torch.int32), (1, 0))
