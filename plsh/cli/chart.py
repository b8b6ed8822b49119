"""The picture of ``plsh bench``: time against length, by matplotlib, which only this needs."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..bench import Measurement
from .common import CliError, check_output


def load(path: Path) -> Any:
    """Return matplotlib's pyplot without a display; refuse early what would fail at the end."""
    check_output("--png", path)
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise CliError(
            "--png needs matplotlib; pip install 'plsh[bench]', or leave --png out"
        ) from None


def draw(pyplot: Any, path: Path, title: str, rows: Sequence[Measurement]) -> None:
    """Write a panel for each work, a line for each implementation."""
    works = list(dict.fromkeys(row.work for row in rows))
    figure, axes = pyplot.subplots(
        1, len(works), squeeze=False, figsize=(7 * len(works), 5), layout="constrained"
    )
    for axis, work in zip(axes[0], works, strict=True):
        for name in dict.fromkeys(row.name for row in rows):
            series = [
                (row.length, row.timing.seconds, row.error or 0.0)
                for row in rows
                if (row.name, row.work) == (name, work) and row.timing is not None
            ]
            if series:
                lengths, seconds, errors = zip(*series, strict=True)
                label = f"{name}, error {max(errors):.0e}"
                axis.loglog(lengths, seconds, marker="o", label=label)
        axis.set(title=work, xlabel="length n", ylabel="seconds")
        axis.grid(visible=True, which="both", alpha=0.3)
        axis.legend()
    figure.suptitle(title, fontsize=9)
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise CliError(f"cannot write --png {path}: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)
