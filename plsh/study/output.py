"""What every study leaves: a JSON document, figures, and its verdicts on the screen."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..bench import machine
from ..cli.common import CliError, write

Draw = Callable[[Mapping[str, Any], Path], list[Path]]


def folder_of(path: Path) -> Path:
    """Make the folder that results go to, and check that they can."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(f"cannot make --output {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise CliError(f"--output {path} is not writable")
    return path


def leave(name: str, settings: Any, found: dict[str, Any], folder: Path, draw: Draw) -> None:
    """Write ``<name>.json`` and the figures into a folder, and print the verdicts.

    Parameters
    ----------
    name : str
        Of the study.
    settings : dataclass
        What it was run with.
    found : dict
        Results, with their `claims`.
    folder : Path
    draw : callable
        Draws the document's figures into the folder and returns their paths.
    """
    document = {"study": name, "settings": asdict(settings), "machine": machine.facts()} | found
    document = json.loads(json.dumps(document))  # what is drawn is what is written
    path = folder / f"{name}.json"
    write_whole(path, lambda p: p.write_text(json.dumps(document) + "\n", encoding="utf-8"))
    for claim in document["claims"]:
        write(f"{claim['verdict']:<14}  {claim['claim']}: {measured(claim)}")
    for made in (path, *draw(document, folder)):
        write(f"wrote {made}")


def measured(claim: Mapping[str, Any]) -> str:
    """Say what was measured of a claim, as read from JSON, and what it needed."""
    m = claim["measured"]
    return f"{m['mean']:.3g} [{m['low']:.3g}, {m['high']:.3g}], needs {claim['needs']}"


def write_whole(path: Path, write_to: Callable[[Path], object]) -> None:
    """Write a file whole or not at all: beside the target, then renamed over it."""
    partial = path.with_name(f".{path.name}.tmp")
    try:
        write_to(partial)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CliError(f"cannot write {path}: {error.strerror or error}") from None
