"""Bits per byte, accuracy and rank of held-out text, by sliding windows of several lengths."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arms import Arm
from .corpus import Bytes
from .language_model import LanguageModel

MULTIPLES = (1, 2, 4)
"""Lengths of the windows, in units of the training length."""
_FIRST_DRAW = 1 << 32
"""Evaluation draws from here on: never the blocks of a training step."""


class Metrics(NamedTuple):
    """How well a model predicts the same bytes under windows of one length.

    Attributes
    ----------
    bits_per_byte : float
    top1, top10 : float
        Share of bytes that were the likeliest, among the ten likeliest.
    mrr : float
        Mean of 1/rank of the true byte.
    bytes : int
        How many were scored.
    """

    bits_per_byte: float
    top1: float
    top10: float
    mrr: float
    bytes: int


def scored(length: int, held_out: int, most: int) -> tuple[int, int]:
    """Return how many windows fit in held-out text, and how many bytes each scores.

    Each scores its last half of the training length, so that a byte has at least as much context;
    the first byte scored comes after the longest window, so that all lengths score the same ones.
    """
    stride = length // 2
    return min(most // stride, (held_out - 1 - max(MULTIPLES) * length) // stride), stride


def evaluate(
    model: LanguageModel,
    arm: Arm,
    held_out: Bytes,
    length: int,
    multiple: int,
    most: int,
    seed: int,
) -> Metrics:
    """Score up to `most` bytes of held-out text in windows of ``multiple * length``.

    Parameters
    ----------
    model : LanguageModel
    arm : Arm
        What attends; its blocks are drawn anew for each batch of windows if it is fresh.
    held_out : numpy.ndarray, uint8
    length : int
        Of training.
    multiple : int
        One of `MULTIPLES`.
    most : int
        Bytes to score.
    seed : int
        Of the blocks.
    """
    windows, stride = scored(length, held_out.size, most)
    size = multiple * length
    text = torch.from_numpy(held_out.astype("int64"))
    ends = max(MULTIPLES) * length + 1 + stride * (1 + torch.arange(windows))
    batch = max(1, 2048 // size)
    bits: list[Tensor] = []
    ranks: list[Tensor] = []
    with torch.inference_mode():
        for draw, chosen in enumerate(torch.split(ends, batch)):
            at = chosen[:, None] - size + torch.arange(size)
            logits = model(text[at - 1], arm, seed, _FIRST_DRAW + draw)[:, -stride:]
            target = text[at[:, -stride:]][..., None]
            chance = torch.log_softmax(logits, -1).gather(-1, target)
            bits.append(-chance / torch.log(torch.tensor(2.0)))
            ranks.append(1 + (logits > logits.gather(-1, target)).sum(-1))
    rank = torch.cat([x.flatten() for x in ranks]).double()
    return Metrics(
        float(torch.cat([x.flatten() for x in bits]).double().mean()),
        float((rank <= 1).double().mean()),
        float((rank <= 10).double().mean()),
        float((1 / rank).mean()),
        rank.numel(),
    )


def all_lengths(
    model: LanguageModel, arm: Arm, held_out: Bytes, length: int, most: int, seed: int
) -> dict[str, dict[str, Any]]:
    """Return the metrics at each of `MULTIPLES`, by the multiple as text, as JSON wants it."""
    return {
        str(m): evaluate(model, arm, held_out, length, m, most, seed)._asdict() for m in MULTIPLES
    }
