"""Text to train on, without its own repetitions, so that held-out text is not in the training's."""

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..cli.common import CliError
from ..cli.text import default_text

Bytes = npt.NDArray[np.uint8]

_HELD_OUT = 0.1


class Corpus(NamedTuple):
    """Bytes as tokens: `train`, then `held_out`, which follows it; `source` names the text."""

    train: Bytes
    held_out: Bytes
    source: str


def documentation() -> Corpus:
    """Return all documentation in Python's standard library: its help topics and docstrings.

    Held out is the same part of the topics as by `load`, and the last tenth of the docstrings.
    """
    topics = load(None, 0)
    held = (topics.train.tobytes() + topics.held_out.tobytes()).split(b"\n\n")
    told = dict.fromkeys(p for text in _docstrings() for p in text.encode().split(b"\n\n"))
    for paragraph in held:
        told.pop(paragraph, None)
    tokens = np.frombuffer(b"\n\n".join(told), dtype=np.uint8)
    cut = tokens.size - int(_HELD_OUT * tokens.size)
    return Corpus(
        np.concatenate([tokens[:cut], topics.train]),
        np.concatenate([topics.held_out, tokens[cut:]]),
        "pydoc_data.topics and the docstrings of the standard library",
    )


def _docstrings() -> Iterator[str]:
    """Yield the docstrings of the modules of the standard library, tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if parts[0] == "site-packages" or {"test", "tests", "idlelib", "lib2to3"} & set(parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates, and files that are wrong on purpose
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def load(path: Path | None, least: int) -> Corpus:
    """Read a file, or the documentation that ships with Python, and hold its last tenth out.

    Documentation repeats itself: of equal paragraphs (between blank lines) only the first stays.

    Parameters
    ----------
    path : Path or None
        None is `pydoc_data.topics`.
    least : int
        Bytes that each part must have.

    Raises
    ------
    CliError
        The text cannot be read, or is too short.
    """
    source = "pydoc_data.topics" if path is None else path.name
    try:
        text = default_text() if path is None else path.read_bytes()
    except OSError as error:
        raise CliError(f"cannot read --text {path}: {error.strerror}") from None
    paragraphs = dict.fromkeys(text.replace(b"\r\n", b"\n").split(b"\n\n"))
    tokens = np.frombuffer(b"\n\n".join(paragraphs), dtype=np.uint8)
    cut = tokens.size - int(_HELD_OUT * tokens.size)
    corpus = Corpus(tokens[:cut], tokens[cut:], source)
    for name, part in {"train": corpus.train, "hold out": corpus.held_out}.items():
        if part.size < least:
            raise CliError(
                f"--text must leave at least {least} bytes to {name}, got {part.size} "
                f"of {tokens.size} without repeated paragraphs; give a longer text"
            )
    return corpus
