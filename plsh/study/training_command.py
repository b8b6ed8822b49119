"""What ``plsh study training`` does: the table of runs with a progress bar, verdicts, figures."""

import argparse
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from ..cli.common import write
from . import box, corpus, figures, output
from .arms import TRAINED
from .language_model import Shape
from .training import Run, Settings, table
from .training_claims import judge

QUICK = Settings(
    Shape(layers=2, dims=64, heads=4, max_bias=3), length=64, batch=8, steps=40, scored=1024
)


def run(args: argparse.Namespace, show: bool) -> None:
    """Train, evaluate, judge, draw.

    Parameters
    ----------
    args : argparse.Namespace
        Of ``plsh study training``.
    show : bool
        Whether to show progress.
    """
    torch.set_num_threads(args.threads)
    settings = QUICK if args.quick else Settings()
    if args.steps is not None:
        settings = replace(settings, steps=args.steps)
    folder = output.folder_of(args.output)
    text = corpus.load(args.text, settings.least_bytes)
    after = _Bars() if show else lambda run: None
    results = table(settings, TRAINED, args.seeds, text, folder / "training", after)
    claims = [c.plain() for c in judge(results)]
    runs = [{k: v for k, v in r.items() if k != "identity"} for r in results]
    found = {"text": results[0]["identity"]["text"], "runs": runs, "claims": claims}
    output.leave("training", settings, found, folder, figures.training)


def model(args: argparse.Namespace, show: bool) -> None:
    """Train the model in the box and say how good it is."""
    torch.set_num_threads(args.threads)
    settings = box.QUICK if args.quick else box.SETTINGS
    folder = output.folder_of(args.output) / "model"
    text = corpus.load(None, settings.least_bytes) if args.quick else corpus.documentation()
    after = _Bars() if show else lambda run: None
    found = box.run(settings, text, folder, after)
    for name, bits in found["bits per byte"].items():
        write(f"{bits:.4f} bits per byte of held-out text, weights in {name}")
    write(f"wrote {found['path']}, {found['file bytes']} bytes")


class _Bars:
    """A progress bar for each run."""

    def __init__(self) -> None:
        self.bar: Any = None

    def __call__(self, run: Run) -> None:
        total = run.settings.steps
        if self.bar is None:
            name = f"{run.arm.name}, seed {run.seed}"
            self.bar = tqdm(total=total, initial=run.step - 1, desc=name, mininterval=1.0)
        self.bar.set_postfix_str(f"{run.losses[-1]:.3f} bits", refresh=False)
        self.bar.update(1)
        if run.step == total:
            self.bar.close()
            self.bar = None
