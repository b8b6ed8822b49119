"""Train the byte model that ships with plsh, and write it as `plsh.byte_model` reads it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..byte_model import ByteModel, save
from ..byte_model.model import bits_per_byte, load
from .arms import Arm
from .corpus import Corpus
from .language_model import LanguageModel, Shape
from .training import Run, Settings

SETTINGS = Settings(
    Shape(layers=4, dims=128, heads=8, max_bias=7),
    length=1024,
    batch=4,
    steps=3000,
    rate=2e-3,
    scored=32768,
)
"""sigma up to 128 tokens; about 820,000 weights."""
QUICK = Settings(
    Shape(layers=2, dims=32, heads=2, max_bias=3), length=64, batch=4, steps=40, scored=1024
)
ARM = Arm("window tol")


def run(settings: Settings, corpus: Corpus, folder: Path, after: Any) -> dict[str, Any]:
    """Train, or go on, and write ``weights.npz``; return bits per byte before and after rounding.

    Parameters
    ----------
    settings : Settings
    corpus : Corpus
    folder : Path
        For checkpoint and result.
    after : callable
        Called with the run after each step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    training = Run(settings, ARM, 0, corpus, folder)
    training.resume()
    training.train(after)
    path = folder / "weights.npz"
    whole = export(training.model, settings)
    save(path, whole)
    text = corpus.held_out[: settings.scored]
    bits = {}
    for name, model in (("float32", whole), ("8 bits", load(path))):
        logits = [
            bits_per_byte(model.logits(part, model.attention("window")), part)
            for part in np.array_split(text, max(1, text.size // 4096))
        ]
        bits[name] = float(np.concatenate(logits).mean())
    return {"bits per byte": bits, "file bytes": path.stat().st_size, "path": str(path)}


def export(model: LanguageModel, settings: Settings) -> ByteModel:
    """Return the same model for NumPy."""
    short = {
        "attention_norm": "attention_norm",
        "attention.qkv": "qkv",
        "attention.out": "out",
        "mlp_norm": "mlp_norm",
        "up": "up",
        "down": "down",
    }
    weights = {"embedding": model.embedding.weight, "norm": model.norm.weight}
    state = model.state_dict()
    for layer in range(settings.shape.layers):
        for name, kept in short.items():
            weights[f"{layer}.{kept}"] = state[f"blocks.{layer}.{name}.weight"]
    with torch.no_grad():
        held = {name: w.detach().numpy().copy() for name, w in weights.items()}
    return ByteModel(held, settings.shape.heads, settings.shape.max_bias, settings.length)
