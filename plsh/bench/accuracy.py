"""How far off an output is, on sampled rows, against the dense float64 oracle."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ..methods import Method, resolve
from ..testing import AttentionInputs, oracle, step_weight
from ..weights import DecayWeight, StepWeight
from .case import Case

_ROWS = 16


def sampled(length: int) -> npt.NDArray[np.int64]:
    """Return the rows that are compared: up to 16, evenly from the first to the last."""
    return np.unique(np.linspace(0, length - 1, min(_ROWS, length)).astype(np.int64))


def exact_rows(case: Case, inputs: AttentionInputs) -> npt.NDArray[np.float64]:
    """Return exact ALiBi on the sampled rows, ``(H, rows, D)`` float64."""
    return _rows(case, inputs, lambda i, keys: {"slopes": case.slopes})


def own_rows(case: Case, inputs: AttentionInputs, method: Method) -> npt.NDArray[np.float64]:
    """Return attention under the method's own weight on the sampled rows: what is left is rounding.

    Raises
    ------
    TypeError
        The method's partitions are in labels that its weight does not hold.
    """
    weight = resolve(method, None, case.slopes, case.heads).weight
    if isinstance(weight, DecayWeight):
        given = {"slopes": case.slopes, "widths": weight.bandwidths}
        return _rows(case, inputs, lambda i, keys: given)
    if not isinstance(weight, StepWeight):
        raise TypeError(f"method must be a recipe, got {method!r}")
    labels = weight.labels(0, case.length)  # (H, s, n)

    def shared(i: int, keys: int) -> dict[str, Any]:
        return {"weight": step_weight(labels[:, :, i : i + 1], labels[:, :, :keys])[None]}

    return _rows(case, inputs, shared)


def error(out: npt.NDArray[Any], rows: npt.NDArray[np.float64]) -> float:
    """Return the relative Frobenius error of an output ``(1, H, n, D)`` on its sampled rows."""
    got = out[0][:, sampled(out.shape[2])].astype(np.float64)
    return float(np.linalg.norm((got - rows).ravel()) / np.linalg.norm(rows.ravel()))


def _rows(case: Case, inputs: AttentionInputs, weight: Any) -> npt.NDArray[np.float64]:
    """Ask the oracle row by row; ``weight(i, keys)`` gives its arguments for query i."""
    found = []
    for i in sampled(case.length).tolist():
        keys = i + 1 if case.causal else case.length
        q, k, v = inputs.q[:, :, i : i + 1], inputs.k[:, :, :keys], inputs.v[:, :, :keys]
        row = oracle(q, k, v, causal=case.causal, q_offset=i, **weight(i, keys))
        found.append(row.out[0])
    return np.concatenate(found, axis=1)
