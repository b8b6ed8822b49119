"""Golden vectors: what the standard's integers, and small float64 results, are."""

import json
from importlib import resources
from typing import Any

__all__ = ["load", "names"]


def names() -> tuple[str, ...]:
    """Return the names of the sets of vectors.

    Examples
    --------
    >>> "random_binning" in names()
    True
    """
    files = (resources.files(__package__) / "vectors").iterdir()
    return tuple(sorted(f.name[:-5] for f in files if f.name.endswith(".json")))


def load(name: str) -> Any:
    """Return one set of golden vectors as lists, dicts and exact Python numbers.

    Parameters
    ----------
    name : str
        One of `names`: "words" (random words, folded seeds, shift counts), a hash family in
        snake case (widths W and shifts S in units of 2^-24 token, thresholds in units of 2^-53,
        labels), or "attention" (inputs, labels, output, lse and gradients in float64).

    Raises
    ------
    ValueError
        There is no such set.

    Notes
    -----
    Spec: HSH-1 … HSH-9. Numbers above 2^53 occur: a reader of the files needs exact integers.

    Examples
    --------
    >>> load("words")["shift_counts"]["16"]
    2
    """
    if name not in names():
        raise ValueError(f"name must be one of {names()}, got {name!r}")
    return json.loads(
        (resources.files(__package__) / "vectors" / f"{name}.json").read_text("utf-8")
    )
