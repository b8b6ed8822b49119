"""Assertions about attention outputs, with a measured tolerance instead of a chosen one.

An error is judged by that of the *plain* computation in the same precision: dense, logits in
float32 from the inputs as given, P rounded to the input dtype before the product with v, output
rounded. ``err <= factor * (err_plain + eps * max|ref|)``, all against the float64 oracle.

Two terms make that fair where the plain computation errs less than it might. A sum that cancels
(a gradient that is 0, say) has the rounding of its terms, in the dtype of accumulation; and in
float64 the plain computation rounds as the oracle does, so the oracle's own rounding is allowed.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import compat
from ..backend import AttentionOutput
from .inputs import round_to
from .oracle import OracleResult, decay_weight, visibility

__all__ = [
    "BACKWARD",
    "FORWARD",
    "Measured",
    "PlainResult",
    "assert_attention_close",
    "assert_equal_to_rounding",
    "assert_gradients_close",
    "assert_identical",
    "assert_output_close",
    "plain_attention",
]

FORWARD, BACKWARD = 2.0, 3.0
"""Factors of the tolerance for outputs and for gradients."""

_ORACLE = 8 * 2.0**-52
"""Rounding of the oracle itself, relative."""

_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


class Measured(NamedTuple):
    """What an assertion measured.

    Attributes
    ----------
    name : str
        Of the array.
    error, tolerance : float
        Largest error against the oracle, and the largest that passes.
    """

    name: str
    error: float
    tolerance: float


class Terms(NamedTuple):
    """Largest sum of magnitudes behind any element of each gradient."""

    q: float
    k: float
    v: float
    slopes: float


class PlainResult(NamedTuple):
    """Output, lse and gradients of the plain computation: rounded values, held in float64."""

    out: npt.NDArray[np.float64]
    lse: npt.NDArray[np.float64]
    q: npt.NDArray[np.float64]
    k: npt.NDArray[np.float64]
    v: npt.NDArray[np.float64]
    slopes: npt.NDArray[np.float64] | None
    terms: Terms


def plain_attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    dtype: str,
    weight: npt.ArrayLike | None = None,
    slopes: npt.ArrayLike | None = None,
    widths: Any = None,
    causal: bool = False,
    scale: float | None = None,
    q_offset: Any = 0,
    k_offset: Any = 0,
    segment_ids: Any = None,
    grad_out: npt.ArrayLike | None = None,
    grad_lse: npt.ArrayLike | None = None,
) -> PlainResult:
    """Compute attention and its gradients as a plain dense program of that precision would.

    Logits, softmax and sums in float32 (float64 for float64); P and dS rounded to `dtype` as
    operands of the products with v, k and q; output and gradients rounded to `dtype`.

    Parameters
    ----------
    q, k, v : array_like, shapes (B, H, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv)
        Values exact in `dtype`.
    dtype : {"float16", "bfloat16", "float32", "float64"}
        Of the computation that is judged.
    weight, slopes, widths, causal, scale, q_offset, k_offset, segment_ids, grad_out, grad_lse
        As for `plsh.testing.oracle.oracle`.

    Returns
    -------
    PlainResult

    Raises
    ------
    ValueError
        Not just one of `weight` and `slopes` is given.

    Notes
    -----
    Spec: TST-3.

    Examples
    --------
    >>> plain_attention([[[[1.0]]]], [[[[1.0]]]], [[[[3.0]]]], dtype="float16", slopes=[1.0]).out
    array([[[[3.]]]])
    """
    if (weight is None) == (slopes is None):
        raise ValueError("give weight or slopes, and not both")
    wide: Any = np.float64 if dtype == "float64" else np.float32
    qw, kw, vw = (np.array(x, dtype=wide) for x in (q, k, v))
    batch, heads, len_q, dim = qw.shape
    kv_heads, len_k = kw.shape[1], kw.shape[2]
    q_at, k_at = (
        np.broadcast_to(np.asarray(offset, dtype=np.int64), (batch,))[:, None] + np.arange(length)
        for offset, length in ((q_offset, len_q), (k_offset, len_k))
    )
    distance = np.abs(q_at[:, :, None] - k_at[:, None, :])  # (B, Nq, Nk)
    seen = visibility(q_at, k_at, causal, segment_ids)[:, None]
    if segment_ids is not None:
        pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        for x, ids in ((qw, pair[0]), (kw, pair[1]), (vw, pair[1])):
            x[np.broadcast_to((np.asarray(ids) < 0)[:, None], x.shape[:3])] = 0
    if slopes is None:
        w = np.broadcast_to(np.asarray(weight), (batch, heads, len_q, len_k))
        seen = seen & (w > 0)
        bias = np.log(np.where(w > 0, w, 1.0)).astype(wide)
    else:
        m = np.minimum(np.asarray(slopes, dtype=np.float64), np.finfo(wide).max / 2**31)
        m = np.broadcast_to(m.astype(wide), (batch, heads))
        seen = seen & (decay_weight(np.zeros(heads), distance, widths) > 0)
        bias = -m[:, :, None, None] * distance[:, None].astype(wide)

    c: Any = wide(dim**-0.5 if scale is None else scale)
    group = heads // kv_heads if kv_heads else 1
    kh, vh = (np.repeat(x, group, axis=1) for x in (kw, vw))
    logits = np.where(seen, c * (qw @ kh.swapaxes(-1, -2)) + bias, -np.inf)
    top = np.max(logits, axis=-1, initial=-np.inf, keepdims=True)
    alive = np.isfinite(top)
    e = np.exp(np.where(seen, logits - np.where(alive, top, 0), -np.inf)).astype(wide)
    total = np.where(alive, e.sum(axis=-1, keepdims=True), 1)
    p = e / total
    lse = np.where(alive, np.where(alive, top, 0) + np.log(total), -np.inf)[..., 0]
    rounded = round_to(p, dtype).astype(wide)
    out = round_to(rounded @ vh, dtype).astype(wide)

    do = np.ones_like(out) if grad_out is None else np.asarray(grad_out, dtype=wide)
    dl = np.zeros_like(lse) if grad_lse is None else np.asarray(grad_lse, dtype=wide)
    ds = p * (do @ vh.swapaxes(-1, -2) - (do * out).sum(-1, keepdims=True) + dl[..., None])
    narrow = round_to(ds, dtype).astype(wide)
    by_key = [c * (narrow.swapaxes(-1, -2) @ qw), rounded.swapaxes(-1, -2) @ do]
    dk, dv = (x.reshape(batch, kv_heads, group, len_k, x.shape[-1]).sum(axis=2) for x in by_key)
    by_slope = None
    if slopes is not None:
        by_slope = -(ds * distance[:, None].astype(wide)).sum(axis=(-2, -1))
        by_slope = (by_slope if np.ndim(slopes) == 2 else by_slope.sum(axis=0)).astype(np.float64)
    size = np.abs(do) @ np.abs(vh).swapaxes(-1, -2) + np.abs(do * out).sum(-1, keepdims=True)
    size = p * (size + np.abs(dl[..., None]))
    sums = (
        abs(c) * (size @ np.abs(kh)),
        group * abs(c) * (size.swapaxes(-1, -2) @ np.abs(qw)),
        group * (p.swapaxes(-1, -2) @ np.abs(do)),
        (size * distance[:, None]).sum(axis=(0, -2, -1)),
    )
    terms = Terms(*(float(np.max(x, initial=0)) for x in sums))
    dq, dk, dv = (round_to(x, dtype).astype(np.float64) for x in (c * (narrow @ kh), dk, dv))
    return PlainResult(out.astype(np.float64), lse.astype(np.float64), dq, dk, dv, by_slope, terms)


def assert_attention_close(
    actual: Any,
    expected: npt.NDArray[Any],
    plain: npt.NDArray[Any],
    *,
    like: Any,
    dtype: str | None = None,
    factor: float = FORWARD,
    terms: float = 0.0,
    name: str = "out",
) -> Measured:
    """Assert that `actual` is as near the oracle as the plain computation, within a factor.

    Namespace, dtype, shape and device are checked first; a NaN on either side fails, and so does
    an infinity that stands on one side only.

    Parameters
    ----------
    actual : Array
        What is judged.
    expected : ndarray, float64
        Of the oracle.
    plain : ndarray
        Of `plain_attention`.
    like : Array
        An input: `actual` must be of its namespace, device and, if `dtype` is None, dtype.
    dtype : str, optional
        Name of the dtype that `actual` must have.
    factor : float, default 2
        `FORWARD`, or `BACKWARD` for gradients.
    terms : float, default 0.0
        Magnitude of the terms of a sum that may cancel.
    name : str, default "out"
        What the message calls it.

    Returns
    -------
    Measured
        The error and the tolerance.

    Raises
    ------
    AssertionError
        With the error and the tolerance.

    Notes
    -----
    Spec: TST-4, NUM-7.

    Examples
    --------
    >>> x = np.ones((1, 1, 2, 3))
    >>> assert_attention_close(x, x, x, like=x).error
    0.0
    """
    _check_form(actual, np.shape(expected), like, dtype, name)
    values = compat.to_host(actual).astype(np.float64)
    finite = _check_infinities(values, np.asarray(expected, dtype=np.float64), name)
    if not np.any(finite):
        return Measured(name, 0.0, 0.0)
    reference = np.asarray(expected, dtype=np.float64)[finite]
    error = float(np.max(np.abs(values[finite] - reference)))
    with np.errstate(invalid="ignore"):
        own = float(np.max(np.abs(np.asarray(plain, dtype=np.float64)[finite] - reference)))
    if not np.isfinite(own):
        raise AssertionError(f"{name}: the plain computation is not finite where the oracle is")
    size, eps = float(np.max(np.abs(reference))), _EPS[compat.dtype_name(actual)]
    allowed = min(eps, _EPS["float32"]) * terms + _ORACLE * (size + terms)
    tolerance = factor * (own + eps * size + allowed)
    if error > tolerance:
        raise AssertionError(
            f"{name}: error {error:.3e} is above the tolerance {tolerance:.3e} = {factor:g} * "
            f"(plain error {own:.3e} + eps * {size:.3g} + {allowed:.1e})"
        )
    return Measured(name, error, tolerance)


def assert_output_close(
    actual: AttentionOutput, expected: OracleResult, plain: PlainResult, *, like: Any
) -> list[Measured]:
    """Assert that an output and its lse are right; see `assert_attention_close`."""
    out = assert_attention_close(actual.out, expected.out, plain.out, like=like)
    # The lse is a logarithm: rounding of the sum is absolute in it, also where it is near 0.
    lse = assert_attention_close(
        actual.lse,
        expected.lse,
        plain.lse,
        like=like,
        dtype=_lse_dtype(like),
        terms=1.0,
        name="lse",
    )
    return [out, lse]


def assert_gradients_close(
    actual: Any,
    expected: OracleResult,
    plain: PlainResult,
    *,
    like: Any,
    from_lse: bool = False,
) -> list[Measured]:
    """Assert that the gradients by q, k, v are right; see `assert_attention_close`.

    `actual` holds them in that order; a fourth is that by the slopes, of the lse's dtype, None to
    leave it out. With `from_lse` they were made from an lse and an output that had been rounded,
    as by `plsh.attention_vjp`: every term then has an error of eps times the lse, and all terms of
    a gradient by a slope share the rounding of the output.
    """
    lse = float(np.max(np.abs(expected.lse), initial=1, where=np.isfinite(expected.lse)))
    shared = _EPS[compat.dtype_name(like)] / _EPS["float32"]
    measured = []
    for name, grad in zip(("q", "k", "v", "slopes"), actual, strict=False):
        if name == "slopes" and grad is None:
            continue
        terms = getattr(plain.terms, name)
        if from_lse:
            terms *= max(lse, shared) if name == "slopes" else lse
        measured.append(
            assert_attention_close(
                grad,
                getattr(expected, name),
                getattr(plain, name),
                like=like,
                dtype=_lse_dtype(like) if name == "slopes" else None,
                factor=BACKWARD,
                terms=terms,
                name=f"gradient by {name}",
            )
        )
    return measured


def assert_equal_to_rounding(
    actual: Any, expected: Any, *, units: float = 32.0, name: str = "out"
) -> None:
    """Assert that two arrays of one kind differ by rounding only.

    The largest difference is at most `units` times eps times the largest magnitude, or 1.
    Forms and infinities are checked as by `assert_attention_close`.
    """
    _check_form(actual, tuple(expected.shape), expected, None, name)
    values, reference = (compat.to_host(x).astype(np.float64) for x in (actual, expected))
    finite = _check_infinities(values, reference, name)
    if not np.any(finite):
        return
    error = float(np.max(np.abs(values[finite] - reference[finite])))
    size = max(1.0, float(np.max(np.abs(reference[finite]))))
    tolerance = units * _EPS[compat.dtype_name(actual)] * size
    if error > tolerance:
        raise AssertionError(
            f"{name}: difference {error:.3e} is above the tolerance {tolerance:.3e} = "
            f"{units:g} eps * {size:.3g}"
        )


def assert_identical(actual: Any, expected: Any, *, name: str = "out") -> None:
    """Assert that two arrays agree in kind, dtype, shape, device and every value; no NaN."""
    _check_form(actual, tuple(expected.shape), expected, None, name)
    values, reference = compat.to_host(actual), compat.to_host(expected)
    _check_infinities(values.astype(np.float64), reference.astype(np.float64), name)
    differ = values != reference
    if np.any(differ):
        raise AssertionError(
            f"{name}: {int(differ.sum())} of {differ.size} values differ, by up to "
            f"{float(np.max(np.abs(values - reference), where=differ, initial=0)):.3e}"
        )


def _lse_dtype(like: Any) -> str:
    return "float64" if compat.dtype_name(like) == "float64" else "float32"


def _check_form(
    actual: Any, shape: tuple[int, ...], like: Any, dtype: str | None, name: str
) -> None:
    """Assert namespace, dtype, shape and device."""
    kind = compat.kind(like)
    if compat.kind(actual) != kind or compat.namespace(actual) is not compat.namespace(like):
        raise AssertionError(
            f"{name} must be a {kind} array, got {type(actual).__module__}.{type(actual).__name__}"
        )
    wanted = compat.dtype_name(like) if dtype is None else dtype
    if compat.dtype_name(actual) != wanted:
        raise AssertionError(f"{name} must have dtype {wanted}, got {compat.dtype_name(actual)}")
    if tuple(actual.shape) != tuple(shape):
        raise AssertionError(f"{name} must have shape {tuple(shape)}, got {tuple(actual.shape)}")
    if not compat.same_device(actual, like):
        raise AssertionError(f"{name} must be on {like.device}, got {actual.device}")


def _check_infinities(
    values: npt.NDArray[np.float64], reference: npt.NDArray[np.float64], name: str
) -> npt.NDArray[np.bool_]:
    """Assert that nothing is NaN and that infinities coincide; return where both are finite."""
    for which, x in (("it", values), ("the reference", reference)):
        if np.any(np.isnan(x)):
            raise AssertionError(f"{name}: {which} holds {int(np.isnan(x).sum())} NaN")
    odd = (np.isinf(values) | np.isinf(reference)) & (values != reference)
    if np.any(odd):
        where = tuple(int(i) for i in np.argwhere(odd)[0])
        raise AssertionError(
            f"{name}: infinite on one side only in {int(odd.sum())} places, first at {where}: "
            f"got {values[where]}, expected {reference[where]}"
        )
    return np.isfinite(reference)
