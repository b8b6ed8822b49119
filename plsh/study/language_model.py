"""A byte-level causal language model whose attention is an arm of the study."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import alibi
from .arms import Arm

BYTES = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model.

    Parameters
    ----------
    layers, dims, heads : int
        Blocks, width of the residual stream, heads of attention (they divide `dims`).
    max_bias : float
        Exponent of the smallest slope: sigma of the farthest head is ``2**max_bias`` tokens.
    """

    layers: int = 3
    dims: int = 128
    heads: int = 8
    max_bias: float = 5.0

    @property
    def slopes(self) -> tuple[float, ...]:
        """ALiBi's, one for each head."""
        return alibi.slopes_of(self.heads, self.max_bias)


class Attention(nn.Module):
    """Self-attention under an arm, without biases in its projections."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.shape, self.layer = shape, layer
        self.qkv = nn.Linear(shape.dims, 3 * shape.dims, bias=False)
        self.out = nn.Linear(shape.dims, shape.dims, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v ``(B, H, n, D)`` of the residual stream ``(B, n, dims)``."""
        batch, n, _ = x.shape
        heads = self.qkv(x).view(batch, n, 3, self.shape.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        return q, k, v

    def forward(self, x: Tensor, arm: Arm, seed: int, draw: int) -> Tensor:
        """Return the update of the residual stream."""
        out = arm.attend(*self.project(x), self.shape.slopes, seed, self.layer, draw)
        return self.out(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then two layers of 4 dims with GELU, each after a norm and added."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dims, eps=1e-5)
        self.attention = Attention(shape, layer)
        self.mlp_norm = nn.RMSNorm(shape.dims, eps=1e-5)
        self.up = nn.Linear(shape.dims, 4 * shape.dims, bias=False)
        self.down = nn.Linear(4 * shape.dims, shape.dims, bias=False)

    def forward(self, x: Tensor, arm: Arm, seed: int, draw: int) -> Tensor:
        """Return the residual stream after the block."""
        x = x + self.attention(self.attention_norm(x), arm, seed, draw)
        hidden = nn.functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        return x + self.down(hidden)  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """Bytes to logits of the next byte; position comes from attention alone.

    Parameters
    ----------
    shape : Shape
    seed : int
        Of the first weights: all arms of a seed begin alike.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(BYTES, shape.dims)
        self.blocks = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dims, eps=1e-5)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                last = name.endswith(("out.weight", "down.weight"))  # what adds to the stream
                std = 0.02 / math.sqrt(2 * shape.layers) if last else 0.02
                nn.init.normal_(weight, std=std, generator=generator)

    def forward(self, tokens: Tensor, arm: Arm, seed: int, draw: int) -> Tensor:
        """Return logits ``(B, n, 256)`` of the byte after each of ``(B, n)`` int64."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, arm, seed, draw)
        return self.norm(x) @ self.embedding.weight.T  # type: ignore[no-any-return]


def optimizer(model: LanguageModel, rate: float) -> torch.optim.Optimizer:
    """Return AdamW; only matrices decay."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
