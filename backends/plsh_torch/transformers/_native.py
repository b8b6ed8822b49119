"""BLOOM and MPT: their attention modules compute ALiBi themselves; here are these on plsh."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomModel, dropout_add
from transformers.models.mpt.modeling_mpt import MptAttention, MptBlock, MptModel

from ._attend import attend, refuse
from ._settings import Slopes, plan_of


class PlshBloomAttention(BloomAttention):  # type: ignore[misc]
    """BLOOM's attention, by plsh. Takes the place of the class of a loaded module."""

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Any,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """Attend; arguments as of the library's module. `alibi` isn't read."""
        refuse(self.attention_dropout.p if self.training else 0.0, output_attentions)
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        out = attend(plan_of(self), query, key, value, attention_mask, self.inv_norm_factor)
        merged = out.flatten(2)
        if self.pretraining_tp > 1 and self.slow_but_exact:
            parts = (x.chunk(self.pretraining_tp, -1) for x in (merged, self.dense.weight))
            pairs = zip(*parts, strict=True)
            made = sum(nn.functional.linear(x, weight) for x, weight in pairs)
        else:
            made = self.dense(merged)
        return dropout_add(made, residual, self.hidden_dropout, self.training), None


class PlshMptAttention(MptAttention):  # type: ignore[misc]
    """MPT's attention, by plsh. Takes the place of the class of a loaded module."""

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        cache: Any = None,
        attention_mask: Any = None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """Attend; arguments as of the library's module. `position_bias` isn't read."""
        refuse(self.attn_dropout_p if self.training else 0.0, keywords.get("output_attentions"))
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (
            x.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2)
            for x in mixed.chunk(3, dim=2)
        )
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        out = attend(plan_of(self), query, key, value, attention_mask, self.softmax_scale)
        return self.out_proj(out.flatten(2)), None


class PlshMptBlock(MptBlock):  # type: ignore[misc]
    """MPT's block, which doesn't pass `output_attentions` on to its attention."""

    def forward(self, *args: Any, output_attentions: bool = False, **keywords: Any) -> Any:
        """Compute the block; arguments as of the library's module."""
        refuse(0.0, output_attentions)
        return super().forward(*args, **keywords)


CLASSES: dict[type, type] = {
    BloomAttention: PlshBloomAttention,
    MptAttention: PlshMptAttention,
    MptBlock: PlshMptBlock,
}
"""Class of the library -> its replacement."""


def own_slopes(model: nn.Module) -> Slopes | None:
    """Return the slopes that a BLOOM or MPT model's own bias has; None for other models."""
    for module in model.modules():
        if isinstance(module, BloomModel):
            seen = torch.ones((1, 2), dtype=torch.long)
            bias = module.build_alibi_tensor(seen, module.num_heads, torch.float32)
            return tuple((bias[:, 0, 1] - bias[:, 0, 0]).tolist())
        if isinstance(module, MptModel):
            bias = module.build_mpt_alibi_tensor(module.num_heads, 2)
            return tuple((bias[:, 0, 1] - bias[:, 0, 0]).tolist())
    return None
