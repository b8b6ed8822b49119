"""What the tests of laws share: four heads of slopes, one object per method, and a short call."""

import math
from typing import Any

import numpy as np

import plsh
from plsh import testing

SLOPES = (0.5, 0.125, 0.03125, 0.0)
"""One per query head, steep to none; exact in every dtype."""

FAMILY = plsh.RandomBinning(tuple(1 / m if m else math.inf for m in SLOPES))
METHODS = {
    "exact": plsh.Exact(),
    "window": plsh.Window((9, 4, 30, 0)),
    "lsh": plsh.PositionalLSH(5, seed=5),
    "lsh-iid": plsh.PositionalLSH(4, sampler="iid", seed=6),
    "set": FAMILY.sample(4, 400, seed=7),
}
"""Every kind of method, over all positions that the laws use."""
NAMES = tuple(METHODS)
LSH = ("lsh", "lsh-iid", "set")


def attend(q: Any, k: Any, v: Any, method: str, /, **keywords: Any) -> plsh.AttentionOutput:
    """Call the reference backend with the heads' slopes, and ask for the lse."""
    if method != "set":
        keywords.setdefault("slopes", SLOPES)
    keywords = {"return_lse": True, "backend": "reference", "method": METHODS[method], **keywords}
    return plsh.attention(q, k, v, **keywords)


def inputs(
    len_q: int, len_k: int | None = None, dtype: str = "float64", seed: int = 0, **shape: Any
) -> tuple[Any, Any, Any]:
    """Return q, k, v of four query heads that share two key heads; Dv is not D."""
    shape = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 6, **shape}
    return testing.make_inputs(len_q=len_q, len_k=len_k, dtype=dtype, seed=seed, **shape)[:3]


def assert_same(actual: Any, expected: Any, units: float = 32.0) -> None:
    """Assert that two outputs with their lse agree to rounding."""
    testing.assert_equal_to_rounding(actual.out, expected.out, units=units)
    testing.assert_equal_to_rounding(actual.lse, expected.lse, units=units, name="lse")


def rows(output: plsh.AttentionOutput, part: slice) -> plsh.AttentionOutput:
    """Return some of the query rows of an output in layout bhsd."""
    return plsh.AttentionOutput(output.out[..., part, :], output.lse[..., part])


def check_long_sums() -> None:
    """Check that one query of thousands of keys rounds as dense attention does, on ``numpy``."""
    n = 3000
    q, k, v = testing.make_inputs(1, 1, 1, 1, n, head_dim=4, dtype="float32")[:3]
    v = np.abs(v)  # no sum cancels
    call = {"slopes": (2.0**-12,), "q_offset": n - 1}
    expected = testing.oracle(q, k, v, **call)
    plain = testing.plain_attention(q, k, v, dtype="float32", **call)
    given = (x.astype("float32") for x in (q, k, v))
    output = plsh.attention(*given, method="exact", return_lse=True, backend="numpy", **call)
    testing.assert_output_close(output, expected, plain, like=output.out)
