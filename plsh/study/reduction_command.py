"""What ``plsh study reduction`` does: random, adversarial and trained inputs, time, verdicts."""

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import byte_model
from ..cli.common import CliError, progress
from ..cli.text import default_text
from ..methods import PositionalLSH
from . import activations, adversary, corpus, figures, output
from .activations import Heads
from .reduction import QUICK, Cell, Settings, measure, random_heads
from .reduction_claims import ADVERSARIAL, RANDOM_TWIN, judge
from .scaling import exponents, times

Inputs = Callable[[int, int], Sequence[Heads]]


def run(args: argparse.Namespace, show: bool) -> None:
    """Measure, judge, draw."""
    settings = QUICK if args.quick else Settings()
    folder = output.folder_of(args.output)
    if args.retime and (args.text is not None or args.model is not None):
        raise CliError("--retime keeps the inputs of an earlier run: give no --text and no --model")
    cells = _earlier(folder, settings) if args.retime else _measure(args, settings, show)
    timed = times(settings.time_lengths, settings.time_repeats)
    fitted = exponents(timed)
    found = {
        "cells": [c._asdict() for c in cells],
        "times": timed,
        "exponents": {name: fit._asdict() for name, fit in fitted.items()},
        "claims": [c.plain() for c in judge(cells, fitted)],
    }
    output.leave("reduction", settings, found, folder, figures.reduction)


def _measure(args: argparse.Namespace, settings: Settings, show: bool) -> list[Cell]:
    kinds = inputs(settings, args.text, args.model)
    cells: list[Cell] = []
    with progress(args.prog, "inputs", len(kinds) * settings.repeats, show) as step:
        for name, given in kinds.items():
            cells += measure(settings, name, given, step)
    return cells


def _earlier(folder: Path, settings: Settings) -> list[Cell]:
    """Read the errors of an earlier run with these settings."""
    path = folder / "reduction.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        same = document["settings"] == json.loads(json.dumps(asdict(settings)))
    except (OSError, ValueError, KeyError):
        same = False
    if not same:
        raise CliError(f"--retime needs {path} of an earlier run with the same settings")
    return [Cell(**c) for c in document["cells"]]


def inputs(settings: Settings, text: Path | None, model: Path | None) -> dict[str, Inputs]:
    """Return what is measured, by name."""
    kinds: dict[str, Inputs] = {}
    for spread in settings.spreads:
        kinds[f"random, logits of std {spread:g}"] = _random(settings, spread)
    n = settings.adversary_length

    def twin(seed: int, samples: int) -> list[Heads]:
        return [adversary.random_limited(settings.sigmas, n, seed)]

    def adversarial(seed: int, samples: int) -> list[Heads]:
        masks = PositionalLSH(samples, sampler="iid", seed=seed)
        return [adversary.worst(twin(seed, samples)[0], masks, settings.adversary_steps)]

    kinds[RANDOM_TWIN] = twin
    kinds[ADVERSARIAL] = adversarial
    kinds["byte model"] = _byte_model(settings, text)
    if model is not None:
        kinds[f"model {model.resolve().name}"] = _hugging_face(settings, text, model)
    return kinds


def _random(settings: Settings, spread: float) -> Inputs:
    return lambda seed, samples: [random_heads(settings, spread, seed)]


def _byte_model(settings: Settings, path: Path | None) -> Inputs:
    """Give the layers of the model in the box on held-out text, a part for each repetition."""
    model = byte_model.load()
    n = settings.length
    held_out = corpus.load(path, settings.repeats * n).held_out

    @functools.cache
    def layers(seed: int) -> list[Heads]:
        return activations.of_byte_model(model, held_out[seed * n : (seed + 1) * n])

    return lambda seed, samples: layers(seed)


def _hugging_face(settings: Settings, path: Path | None, folder: Path) -> Inputs:
    """Give the layers of a model of transformers on the text, a part for each repetition."""
    model = activations.HuggingFace(folder)
    try:
        read = default_text() if path is None else path.read_bytes()
    except OSError as error:
        raise CliError(f"cannot read --text {path}: {error.strerror}") from None
    words = read.decode(errors="replace")
    part = len(words) // settings.repeats

    @functools.cache
    def layers(seed: int) -> Any:
        return model.heads(words[seed * part : (seed + 1) * part], settings.length)

    return lambda seed, samples: layers(seed)
