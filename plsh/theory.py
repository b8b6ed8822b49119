"""Bounds and certificates: how far a method is from exact ALiBi, before or after it has run.

`psi` to `output_error_bound` restate the two theorems of Wolfson & Wagner 2026 (arXiv 2605.09472)
for Positional LSH, with the constants of the authors' code; each docstring says what is proven
here and what is quoted. `window_width` and `truncation_error_bound` are this library's own and
are about `Window`. All of it runs on the host in float64; arrays may come from any library as
long as their values can be read.

Units: sigma = 1/slope, widths and block lengths in tokens; slopes per token.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from . import compat, methods
from . import validation as rules
from .alibi import slopes_of
from .compat import Array
from .hashing import check_samples
from .partition import MAX_POSITION

__all__ = [
    "block_size_bound",
    "output_error_bound",
    "psi",
    "samples_for",
    "spectral_error_bound",
    "truncation_error_bound",
    "window_width",
]

Float = npt.NDArray[np.float64]

_EPS = {"float32": 2.0**-23, "float64": 2.0**-52}


# --- theorem 2.1: the mean of random masks --------------------------------------------------------


def psi(sigma: Any) -> Any:
    """Return ``1 + sigma + coth(1/(2 sigma))``, the scale of one mask's spectral deviation.

    Parameters
    ----------
    sigma : float or array_like
        Decay length 1/slope in tokens, finite and > 0.

    Returns
    -------
    float or numpy.ndarray
        Psi, without unit; float64 of the shape of `sigma`. Between 2 and about ``1 + 3 sigma``.

    Raises
    ------
    TypeError
        `sigma` is not made of real numbers.
    ValueError
        `sigma` is not finite and > 0.

    Notes
    -----
    Spec: THY-1. Source: Wolfson & Wagner 2026, theorem 2.1, as coded by the authors:
    ``1 + sigma + (e^{1/sigma} + 1)/(e^{1/sigma} - 1)``. The last term is coth(1/(2 sigma)), the
    sum of ``exp(-|d|/sigma)`` over all integers d, which no row sum of L* and hence no
    ``||L*||_2`` exceeds. As 1/tanh it neither overflows for a short decay nor cancels for a long
    one.

    Examples
    --------
    >>> round(psi(32.0), 3)
    97.005
    """
    decay = _positive("sigma", sigma)
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        value = 1.0 + decay + 1.0 / np.tanh(0.5 / decay)
    return _plain(value)


def spectral_error_bound(n: int, samples: int, sigma: Any, delta: float | None = None) -> Any:
    """Bound ``||M~ - L*||_2``, the error of the mean of `samples` iid masks as a bias matrix.

    Parameters
    ----------
    n : int
        Sequence length, >= 1.
    samples : int
        Masks per head, s >= 1, drawn with ``sampler="iid"``.
    sigma : float or array_like
        Decay length 1/slope in tokens, finite and > 0.
    delta : float, optional
        In (0, 1): the returned error is exceeded with probability at most `delta`. None: bound
        the expected error instead.

    Returns
    -------
    float or numpy.ndarray
        Spectral norm of the error, absolute (``||L*||_2`` itself is at most coth(1/(2 sigma)));
        float64 of the shape of `sigma`.

    Raises
    ------
    TypeError
        A count is not an integer, or a number not real.
    ValueError
        An argument is outside its range.

    Notes
    -----
    Spec: THY-2. Source: Wolfson & Wagner 2026, theorem 2.1, as reconstructed from the authors'
    code; neither form is proven here.

    - `delta` None: ``Psi (sqrt(ln n / s) + ln n / s)``. The theorem holds up to a constant; 1 is
      the constant of the code, and unproven.
    - else the eps at which the tail ``P(||M~ - L*||_2 >= eps) <= n exp(-s eps^2 / (4 Psi
      (4 Psi + eps)))`` equals `delta`: with ``l = ln(n/delta)`` it solves
      ``s eps^2 - 4 Psi l eps - 16 Psi^2 l = 0``, so ``eps = 2 Psi (l + sqrt(l^2 + 4 s l)) / s``.

    Measured errors are 4 to 10 times below the first form, and stratified masks err less still.

    Examples
    --------
    >>> round(spectral_error_bound(2048, 64, 32.0), 2)
    45.04
    """
    length, count, scale = _count("n", n), check_samples(samples, math.inf), psi(sigma)
    if delta is None:
        ratio = math.log(length) / count
        return scale * (math.sqrt(ratio) + ratio)
    log_odds = math.log(length) - math.log(_probability("delta", delta))
    return scale * (2.0 * (log_odds + math.sqrt(log_odds**2 + 4.0 * count * log_odds)) / count)


def samples_for(n: int, sigma: float, eps: float, delta: float) -> int:
    """Return the fewest iid masks that keep ``||M~ - L*||_2`` below `eps`, but for odds `delta`.

    Parameters
    ----------
    n : int
        Sequence length, >= 1.
    sigma : float
        Decay length 1/slope in tokens, finite and > 0.
    eps : float
        Spectral error allowed, absolute, finite and > 0.
    delta : float
        Probability of a larger error, in (0, 1).

    Returns
    -------
    int
        The smallest s with ``spectral_error_bound(n, s, sigma, delta) <= eps``.

    Raises
    ------
    TypeError
        `n` is not an integer, or a number not real.
    ValueError
        An argument is outside its range, or no float counts the masks.

    Notes
    -----
    Spec: THY-3. Source: Wolfson & Wagner 2026, theorem 2.1, tail form as in
    `spectral_error_bound`, solved for s: ``s = 4 Psi (4 Psi + eps) ln(n/delta) / eps^2``.

    Examples
    --------
    >>> samples_for(8192, 4.0, 1.0, 0.01)
    37765
    """
    length, odds = _count("n", n), _probability("delta", delta)
    decay, error = _one_positive("sigma", sigma), _one_positive("eps", eps)
    ratio: float = 4.0 * psi(decay) / error
    needed = ratio * (ratio + 1.0) * (math.log(length) - math.log(odds))
    if needed == math.inf:
        raise ValueError(f"eps must be reachable with a finite number of masks, got {eps!r}")
    count = max(1, math.ceil(needed))
    # Rounding may put `needed` on the other side of an integer.
    if count > 1 and spectral_error_bound(length, count - 1, decay, odds) <= error:
        return count - 1
    return count if spectral_error_bound(length, count, decay, odds) <= error else count + 1


def block_size_bound(sigma: float, samples: int, delta: float) -> int:
    """Return a length that no block of `samples` masks exceeds, but for odds `delta`.

    Parameters
    ----------
    sigma : float
        Decay length 1/slope in tokens, finite and > 0.
    samples : int
        Masks, s >= 1; those of all heads that share sigma count.
    delta : float
        Probability that some block is longer, in (0, 1).

    Returns
    -------
    int
        Length in tokens, at most 2**30; the bandwidth is one less.

    Raises
    ------
    TypeError
        `samples` is not an integer, or a number not real.
    ValueError
        An argument is outside its range.

    Notes
    -----
    Spec: THY-4. Source: Wolfson & Wagner 2026, theorem 2.1 (blocks are O(sigma log(s/delta))),
    with the constant worked out: all blocks of a mask of `RandomBinning` have one width
    b ~ Gamma(2, sigma), so the sequence length does not matter, and
    ``P(b > sigma x) = (1 + x) e^-x``. The x where this is delta/s, by the union bound over the
    masks, gives the width ``w = sigma x``; a block of width at most w holds at most ``ceil(w)``
    positions. Stratified masks are within it too: the s probabilities then differ, but their sum
    is the same. Not for `IndependentCuts`, whose blocks grow with the length.

    Examples
    --------
    >>> block_size_bound(32.0, 16, 0.01)
    313
    """
    decay, count = _one_positive("sigma", sigma), check_samples(samples, math.inf)
    target = math.log(count) - math.log(_probability("delta", delta))
    # x - ln(1 + x) = target: convex and increasing, so Newton from above falls to the root.
    x, lower = math.inf, 2.0 * target + 2.0
    while lower < x:
        x = lower
        lower = x - (x - math.log1p(x) - target) * (1.0 + x) / x
    width = decay * x * (1.0 + 1e-12)
    return math.ceil(width) if width < MAX_POSITION else MAX_POSITION


# --- theorem 2.2: attention under them ------------------------------------------------------------


def output_error_bound(
    spectral_error: Any,
    q: Array,
    k: Array,
    v: Array,
    lse: Array,
    scale: float | None = None,
) -> Any:
    """Bound the output's error by the bias matrix's over the least denominator, for each head.

    Parameters
    ----------
    spectral_error : float or array_like
        ``||M~ - L*||_2`` of each head, >= 0: measured, or from `spectral_error_bound`. Broadcasts
        to the leading axes.
    q : Array, shape (..., Nq, D)
        Queries of one head, or of many along the leading axes; real floating, finite.
    k : Array, shape (..., Nk, D)
        Keys; with the leading axes of `q`, so key heads that are shared are given repeated.
    v : Array, shape (..., Nk, Dv)
        Values, likewise.
    lse : Array, shape (..., Nq)
        Natural log of the denominators of *exact* ALiBi. A row that sees no key has -inf and no
        error.
    scale : float, optional
        Factor of the inner products, c. None: D**-0.5.

    Returns
    -------
    float or numpy.ndarray
        Upper bound of ``||out~ - out||_F``, float64 of the shape of the leading axes; inf where
        it overflows.

    Raises
    ------
    TypeError
        An argument is no concrete real floating array, or a number not real.
    ValueError
        Shapes do not fit, or values are not finite (an error: negative).

    Notes
    -----
    Spec: THY-5. Source: Wolfson & Wagner 2026, theorem 2.2 (error of the bias matrix over the
    minimum biased row sum); the constants are this library's. Proof: let ``A = exp(c Q K^T)``,
    ``E = M~ - L*``, d = exp(lse).

    1. exp(x.y) is the inner product of feature maps of norms exp(|x|^2/2) and exp(|y|^2/2), so A
       is a Schur multiplier: with ``c q.k = x.y``, x and y scaled to equal maximal norms,
       ``||A o E||_2 <= gamma ||E||_2``, ``gamma = exp(|c| max|q| max|k|)``.
    2. With ``dN = (A o E) V`` and ``dd = (A o E) 1``, row by row
       ``out~_i - out_i = (dN_i - dd_i out~_i) / d_i``: the denominator is the exact one.
    3. out~_i is a convex combination of values (or 0), so ``|out~_i| <= max|v|``, and
       ``||dd||_2 <= gamma ||E||_2 sqrt(Nk)``. Together ``||out~ - out||_F <=
       gamma ||E||_2 (||V||_F + sqrt(Nk) max|v|) / min_i d_i``.

    Hidden keys are zeros of both matrices. So under a causal mask the same holds with the causal
    lse and ``||tril(E)||_2`` for the error. That is not bounded by ``||E||_2`` but by
    ``(1 + ceil(log2 n)) ||E||_2`` (halve the triangle: two half triangles side by side and one
    square); measured, it is about 1.3 times as large relative to ``||tril(L*)||_2``.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = np.zeros((4, 2)); v = np.ones((4, 1)); lse = np.log(np.full(4, 2.0))
    >>> output_error_bound(0.1, q, k, v, lse)
    0.2
    """
    error = _real("spectral_error", spectral_error)
    if not np.all((error >= 0) & (error < math.inf)):
        raise ValueError(f"spectral_error must be finite and >= 0, got {spectral_error!r}")
    queries, keys, values = _floats("q", q), _floats("k", k), _floats("v", v)
    for name, x in {"q": queries, "k": keys, "v": values}.items():
        if x.ndim < 2:
            raise ValueError(f"{name} must have shape (..., N, D), got {x.shape}")
    lead, head_dim = queries.shape[:-2], queries.shape[-1]
    if keys.shape[:-2] != lead or values.shape[:-2] != lead:
        raise ValueError(
            "q, k, v must have one leading shape (repeat shared key heads), "
            f"got {queries.shape}, {keys.shape}, {values.shape}"
        )
    if keys.shape[-1] != head_dim or head_dim < 1:
        raise ValueError(
            f"q and k must have one head dim D >= 1, got {queries.shape} and {keys.shape}"
        )
    if values.shape[-2] != keys.shape[-2]:
        raise ValueError(f"k and v must have one length, got {keys.shape} and {values.shape}")
    try:
        error = np.broadcast_to(error, lead)
    except ValueError as cause:
        raise ValueError(
            f"spectral_error must broadcast to the leading axes {lead}, got shape {error.shape}"
        ) from cause
    kept = _log_denominators(lse, queries.shape[:-1])

    least = np.min(kept, axis=-1, initial=math.inf, where=kept > -math.inf)  # (...,)
    largest = np.max(np.linalg.norm(values, axis=-1), axis=-1, initial=0.0)
    size = np.linalg.norm(values, axis=(-2, -1)) + math.sqrt(keys.shape[-2]) * largest
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        top = np.max(_largest_logits(queries, keys, scale), axis=-1, initial=0.0)
        bound = np.exp(top - least + np.log(error * size))
    return _plain(np.where((error * size == 0) | (least == math.inf), 0.0, bound))


# --- windows --------------------------------------------------------------------------------------


def window_width(slope: Any, tol: float) -> Any:
    """Return the width beyond which every weight ``exp(-slope * distance)`` is below `tol`.

    Parameters
    ----------
    slope : float or array_like
        Decay per token, finite and >= 0.
    tol : float
        In (0, 1).

    Returns
    -------
    int or numpy.ndarray
        Width in tokens, ``ceil(ln(1/tol) / slope)``; int64 of the shape of `slope`. Slope 0 sets
        no limit: `plsh.weights.UNLIMITED`.

    Raises
    ------
    TypeError
        `slope` or `tol` is not made of real numbers.
    ValueError
        `slope` is negative or not finite; `tol` is outside (0, 1).

    Notes
    -----
    Spec: THY-6. What ``Window(tol=tol)`` uses. The spectral error of the bias matrix is then
    below ``2 tol / (e^slope - 1)``; that of the output depends on the logits, see
    `truncation_error_bound`.

    Examples
    --------
    >>> window_width(0.5, 1e-6), window_width([0.25, 0.0], 1e-3).tolist()
    (28, [28, 2147483647])
    """
    slopes, limit = _real("slope", slope), _probability("tol", tol)
    if not np.all((slopes >= 0) & (slopes < math.inf)):
        raise ValueError(f"slope must be finite and >= 0, got {slope!r}")
    widths = [methods.window_width(m, limit) for m in slopes.ravel().tolist()]
    return widths[0] if slopes.ndim == 0 else np.array(widths, dtype=np.int64).reshape(slopes.shape)


def truncation_error_bound(
    q: Array,
    k: Array,
    lse: Array,
    slopes: Any,
    width: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    q_offset: Any = None,
    k_offset: Any = 0,
    layout: str = "bhsd",
) -> Float:
    """Bound, row by row, the share of exact ALiBi's weight that a window leaves out.

    A certificate of a windowed result, from what the window has computed, without the dense
    matrix.

    Parameters
    ----------
    q : Array, shape (B, H, Nq, D)
        Queries; real floating, finite. The batch axis may be absent from q, k and lse.
    k : Array, shape (B, Hkv, Nk, D)
        Keys; query head h reads key head ``h // (H // Hkv)``.
    lse : Array, shape (B, H, Nq)
        Natural log of the denominators under the window, float32 or float64, as
        ``attention(…, method=Window(width), return_lse=True)`` returns it, in either layout.
    slopes : array_like, shape (H,) or (B, H), or None
        Decay per token, >= 0; one number serves all heads; None: `alibi_slopes(H)`.
    width : int or sequence of int
        The window: largest distance in tokens that was seen, >= 0; one number, or one per head.
    causal, scale, q_offset, k_offset, layout
        As they were given to `attention`.

    Returns
    -------
    numpy.ndarray, shape (B, H, Nq)
        rho, float64 in [0, 1]: no less than the share of the exact denominator that lies beyond
        `width`. Hence ``||out_exact - out_window||_2 <= rho * 2 max_j |v_j|`` for each row, up to
        the rounding of the outputs. 0 where no key lies beyond; 1 where all do.

    Raises
    ------
    TypeError
        An argument is of the wrong type, or an array's values cannot be read.
    ValueError
        An argument breaks a rule above; the message names it.

    Notes
    -----
    Spec: THY-7. Proof, for row i with kept mass ``exp(lse_i)`` and c the scale: a key at distance
    d has weight ``exp(c q_i.k_j - m d)``, by Cauchy-Schwarz at most ``exp(S_i - m d)`` with
    ``S_i = |c| |q_i| max_j|k_j|``. So the dropped mass is at most ``T_i = exp(S_i) * sum e^{-m d}``
    over the positions beyond the width on each side that hold a key, two geometric sums, and the
    share ``dropped / (kept + dropped)`` grows with the dropped mass. The exact output is
    ``(1 - share) out_window + share * (a mean of dropped values)``, which gives the distance.
    Keys hidden by segment_ids only lessen the dropped mass, so the bound holds with them.

    The lse is taken to be off by at most ``eps ((D + 4) S_i + 2 |lse_i| + 128)``, eps = 2**-23
    (2**-52 if q and lse are float64): the products and sums of D terms, of the slopes with the
    distances, and of the weights in tiles. The bound is raised by as much.

    Time and memory are O(N): nothing is scored. It is attained when all keys are equal and
    parallel to the query; on random inputs it is loose by about the spread of the logits,
    ``exp(S_i - typical logit)``.

    Examples
    --------
    >>> import numpy as np, plsh
    >>> q, k, v = (np.random.default_rng(0).normal(size=(1, 200, 8)) for _ in range(3))
    >>> window = plsh.Window(120)
    >>> out, lse = plsh.attention(q, k, v, slopes=[0.25], method=window, return_lse=True)
    >>> bool(truncation_error_bound(q, k, lse, [0.25], 120).max() < 1e-9)
    True
    """
    layout = rules.check_layout(layout)
    causal = rules.check_flag("causal", causal)
    queries, keys = _floats("q", q), _floats("k", k)
    batched = _check_pair(queries, keys, layout)
    if layout == "bshd":
        queries, keys = compat.swap_heads(queries), compat.swap_heads(keys)
    kept = _log_denominators(lse, queries.shape[:-1])
    if not batched:
        queries, keys, kept = queries[None], keys[None], kept[None]
    batch, heads, len_q, head_dim = queries.shape
    kv_heads, len_k = keys.shape[1:3]

    rows = batch if batched else None
    decay = rules.check_slopes(_host("slopes", slopes), "numpy", rows, heads)
    decay = np.asarray(slopes_of(heads) if decay is None else decay, dtype=np.float64)
    decay = np.atleast_2d(decay)[..., None]  # (B or 1, H, 1)
    limit = _widths(width, heads)[:, None]  # (H, 1)
    offsets = _host("q_offset", q_offset), _host("k_offset", k_offset)
    first_q, first_k = rules.check_offsets(*offsets, (len_q, len_k), "numpy", rows)
    rules.check_positions(None, causal, (first_q, first_k), (len_q, len_k), None)

    at = np.reshape(first_q, (-1, 1, 1)) + np.arange(len_q)  # (B or 1, 1, Nq)
    first = np.reshape(first_k, (-1, 1, 1))
    last = first + len_k - 1
    sides = [(at - last, at - first)]  # distances of the nearest and the farthest key, before …
    if not causal:
        sides.append((first - at, last - at))  # … and after the query
    dropped = np.zeros((1, heads, len_q), dtype=bool)
    far = np.full((1, heads, len_q), -math.inf)  # log of the sums of e^{-m d}
    for nearest, farthest in sides:
        begin = np.maximum(nearest, limit + 1)  # (B or 1, H, Nq)
        count = np.maximum(farthest - begin + 1, 0)
        dropped = dropped | (count > 0)
        far = np.logaddexp(far, _log_geometric_sum(decay, begin, count))

    with np.errstate(over="ignore", invalid="ignore"):
        group = heads // max(kv_heads, 1)
        top = _largest_logits(queries, np.repeat(keys, group, axis=1), scale)  # S, (B, H, Nq)
        both_double = compat.dtype_name(q) == compat.dtype_name(lse) == "float64"
        eps = _EPS["float64" if both_double else "float32"]
        slack = eps * ((head_dim + 4) * top + 2 * np.abs(kept) + 128)
        share = np.exp(-np.logaddexp(0.0, kept - top - far - slack))  # T / (exp(lse) + T)
    # Nothing kept leaves all the weight beyond; a logit that overflows proves nothing.
    share = np.where(np.isneginf(kept) | np.isinf(top), 1.0, share)
    share = np.where(dropped, share, 0.0)
    return share if batched else share[0]


def _log_geometric_sum(
    decay: Float, begin: npt.NDArray[np.int64], count: npt.NDArray[np.int64]
) -> Float:
    """Return ``ln sum e^{-decay d}`` over d = begin … begin + count - 1; -inf for none.

    Rounded up: `begin` is shortened by more than the product's rounding.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        terms = np.where(decay > 0, np.expm1(-decay * count) / np.expm1(-decay), count)
        total: Float = np.log(np.abs(terms)) - decay * begin * (1.0 - 2.0**-50)
    return total


def _largest_logits(q: Float, k: Float, scale: float | None) -> Float:
    """Return ``|scale| |q_i| max_j|k_j|``, ``(..., Nq)``, which no logit of row i exceeds."""
    longest = np.max(np.linalg.norm(k, axis=-1), axis=-1, initial=0.0)
    c = abs(rules.check_scale(scale, q.shape[-1], "float64"))
    top: Float = c * np.linalg.norm(q, axis=-1) * longest[..., None]
    return top


# --- arguments ------------------------------------------------------------------------------------


def _plain(x: Any) -> Any:
    """Return a 0-d array as a float."""
    return float(x) if np.ndim(x) == 0 else x


def _host(name: str, x: Any) -> Any:
    """Return a framework's array as a NumPy array; anything else as it is."""
    if compat.is_traced(x):
        raise TypeError(f"{name} must be concrete, got a traced array: a bound reads its values")
    return compat.to_host(x) if compat.kind(x) not in ("", "numpy") else x


def _real(name: str, value: Any) -> Float:
    """Return a number, sequence or array as a float64 array."""
    array = np.asarray(_host(name, value))
    if array.dtype.kind not in "iuf" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name} must be made of real numbers, got {value!r}")
    return array.astype(np.float64)


def _positive(name: str, value: Any) -> Float:
    array = _real(name, value)
    if not np.all((array > 0) & (array < math.inf)):
        raise ValueError(f"{name} must be finite and > 0, got {value!r}")
    return array


def _one_positive(name: str, value: Any) -> float:
    array = _positive(name, value)
    if array.ndim:
        raise ValueError(f"{name} must be one number, got shape {array.shape}")
    return float(array)


def _probability(name: str, value: Any) -> float:
    array = _real(name, value)
    if array.ndim or not 0 < array < 1:
        raise ValueError(f"{name} must be one number in (0, 1), got {value!r}")
    return float(array)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be >= 1, got {value}")
    return int(value)


def _widths(width: Any, heads: int) -> npt.NDArray[np.int64]:
    """Return the width of each head, ``(H,)``."""
    if width is None:
        raise TypeError("width must be an int or one int per head, got None")
    checked = methods.Window(_host("width", width)).width
    widths = checked if isinstance(checked, tuple) else (checked,) * heads
    if len(widths) != heads:
        raise ValueError(f"width must be an int or one per head ({heads}), got {len(widths)}")
    return np.array(widths, dtype=np.int64)


def _floats(name: str, x: Any) -> Float:
    """Return a real floating array as finite float64."""
    rules.check_is_array(name, x)
    if compat.dtype_name(x) not in rules.DTYPES:
        raise TypeError(f"{name} must have a dtype of {rules.DTYPES}, got {compat.dtype_name(x)}")
    array = np.asarray(_host(name, x)).astype(np.float64)
    if not np.all(np.isfinite(array)):
        raise ValueError(f"{name} must be finite, got NaN or infinity")
    return array


def _log_denominators(lse: Any, shape: tuple[int, ...]) -> Float:
    """Return lse as float64, checked."""
    rules.check_is_array("lse", lse)
    if compat.dtype_name(lse) not in _EPS:
        raise TypeError(f"lse must have a dtype of {tuple(_EPS)}, got {compat.dtype_name(lse)}")
    array = np.asarray(_host("lse", lse)).astype(np.float64)
    if array.shape != shape:
        raise ValueError(f"lse must have shape {shape}, got {array.shape}")
    if not np.all(array < math.inf):
        raise ValueError("lse must be finite or -inf, got NaN or +inf")
    return array


def _check_pair(q: Float, k: Float, layout: str) -> bool:
    """Check that q and k fit; return whether they have a batch axis."""
    for name, x in {"q": q, "k": k}.items():
        if x.ndim not in (3, 4):
            axes = "batch, heads, len, dim" if layout == "bhsd" else "batch, len, heads, dim"
            raise ValueError(
                f"{name} must have shape ({axes}) or the same without batch, got {x.shape}"
            )
    got = f"got q {q.shape}, k {k.shape}"
    if q.ndim != k.ndim or q.shape[:-3] != k.shape[:-3]:
        raise ValueError(f"q and k must have one batch size, or both none, {got}")
    if q.shape[-1] != k.shape[-1] or q.shape[-1] < 1:
        raise ValueError(f"q and k must have one head dim D >= 1, {got}")
    head = -3 if layout == "bhsd" else -2
    heads, kv_heads = q.shape[head], k.shape[head]
    if (heads % kv_heads if kv_heads else heads) != 0:
        raise ValueError(
            f"the heads of q ({heads}) must be a multiple of the heads of k ({kv_heads}), "
            f"{got} with layout={layout!r}"
        )
    return q.ndim == 4
