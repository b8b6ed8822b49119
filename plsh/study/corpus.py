"""Text to train on, without its own repetitions, so that held-out text is not in the training's."""

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
