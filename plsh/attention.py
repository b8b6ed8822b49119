"""`attention` and `attention_vjp`: arguments -> recipe -> backend -> result."""

from typing import Any, NamedTuple, Never

from . import compat, registry
from . import validation as rules
from .alibi import slopes_of
from .backend import AttentionOutput, Backend, Gradients, Operands, Request, Static
from .compat import Array
from .errors import UnsupportedByBackendError
from .methods import Method, check_method, method_name, resolve
from .weights import block_range

__all__ = ["attention", "attention_vjp"]


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    method: str | Method = "lsh",
    slopes: Any = None,
    causal: bool = False,
    scale: float | None = None,
    q_offset: Any = None,
    k_offset: Any = 0,
    segment_ids: Any = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    backend: str | None = None,
    **refused: Never,
) -> Any:
    """Attention with linear biases, ``softmax_j(scale * q_i . k_j - slope * |i - j|) @ v_j``.

    As an approximation of ALiBi, method ``"window"`` beats ``"lsh"`` at equal arithmetic and at
    equal bandwidth: take ``"window"`` where ALiBi itself is wanted fast, ``"lsh"`` to reproduce
    and extend the paper, for kernels that take no bias, and for randomised training masks, and
    ``"exact"`` as the yardstick.

    Every method is attention under a positional weight:
    ``out_i = sum_j w_ij e_ij v_j / sum_j w_ij e_ij`` with ``e_ij = exp(scale * q_i . k_j)``, and
    w_ij = ``exp(-slope * |i - j|)`` (exact), the same up to a width and 0 beyond (window), or the
    share of s random partitions in which i and j are in one block (lsh), whose mean is the exact
    weight. A positive slope is a decay with distance on both sides, causal or not. The bias is
    not scaled; a model that scales it (Falcon) passes ``slopes * scale``.

    Parameters
    ----------
    q : Array, shape (B, H, Nq, D)
        Queries; real floating, D >= 1. NumPy, torch, JAX, CuPy, or any Array API array.
    k : Array, shape (B, Hkv, Nk, D)
        Keys, of q's kind, dtype and device. H is a multiple of Hkv; query head h reads key head
        ``h // (H // Hkv)``.
    v : Array, shape (B, Hkv, Nk, Dv)
        Values, likewise. The batch axis may be absent from all three.
    method : {"lsh", "window", "exact"}, method object or PartitionSet, default "lsh"
        How the weight is chosen: `Exact`, `Window`, `PositionalLSH`, a name for its defaults, or
        ready partitions.
    slopes : array_like, shape (H,) or (B, H), optional
        Decay per token, >= 0, in the order of query heads; one number serves all heads. None:
        `alibi_slopes(H)`. (B, H) under exact and window only. Slope 0 is plain attention. Must be
        None if the method carries its own widths.
    causal : bool, default False
        Hide keys at positions after the query's.
    scale : float, optional
        Factor of the inner products. None: D**-0.5.
    q_offset : int or (B,) ints, optional
        Position of the first query. None: `k_offset`, which needs Nq == Nk.
    k_offset : int or (B,) ints, default 0
        Position of the first key. Distances, causality and blocks live on this one axis of
        positions, so decoding step by step, chunks, and merged shards of the keys equal the whole
        call, under lsh too. Visible tokens have positions in [0, 2**30); padding may be below 0.
    segment_ids : integer array (B, N), or a pair of them for queries and keys, optional
        Equal ids see each other; a negative id is padding. See `segments_from_lengths`.
    layout : {"bhsd", "bshd"}, default "bhsd"
        Order of the axes of q, k, v and the output; "bshd" is (B, N, H, D).
    return_lse : bool, default False
        Also return the log of the denominators. Never changes the output.
    backend : str, optional
        None: by the kind of q. A name is a demand: that backend runs, or an error says why not.

    Returns
    -------
    Array, shape (B, H, Nq, Dv), or AttentionOutput
        Of q's kind, dtype, device and layout. With `return_lse` a named tuple (out, lse); lse is
        the natural log of ``sum_j w_ij e_ij``, ``(B, H, Nq)`` in either layout, float32 (float64
        for float64). A row that sees no key has out 0 and lse -inf.

    Raises
    ------
    TypeError, ValueError
        An argument breaks a rule above; the message names it.
    UnknownBackendError
        No such backend is registered.
    BackendUnavailableError
        The backend cannot be used here.
    UnsupportedByBackendError
        The backend cannot serve this call.

    Notes
    -----
    Spec: ATT-1 … ATT-24. There is no dropout and no dense mask, and `refused` says so: both need
    the n x n matrix that the library never forms.

    Examples
    --------
    >>> import numpy as np, plsh
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.normal(size=(2, 4, 300, 16)).astype("float32") for _ in range(3))
    >>> plsh.attention(q, k, v, method="window", causal=True).shape
    (2, 4, 300, 16)
    """
    rules.check_no_more(refused)
    want_lse = rules.check_flag("return_lse", return_lse)
    call = _prepare(
        q, k, v, method, slopes, causal, scale, q_offset, k_offset, segment_ids, layout, backend
    )
    out, lse = _checked(call, call.backend.attend(call.q, call.k, call.v, call.request))
    out = call.shape.restore(out)
    return AttentionOutput(out, call.shape.restore_rows(lse)) if want_lse else out


def attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    output: AttentionOutput,
    grad_out: Array,
    grad_lse: Array | None = None,
    *,
    method: str | Method = "lsh",
    slopes: Any = None,
    causal: bool = False,
    scale: float | None = None,
    q_offset: Any = None,
    k_offset: Any = 0,
    segment_ids: Any = None,
    layout: str = "bhsd",
    backend: str | None = None,
    **refused: Never,
) -> Gradients:
    """Gradients of `attention`, for arrays without autograd.

    Parameters
    ----------
    q, k, v
        As given to `attention`, with the same keywords.
    output : AttentionOutput
        What ``attention(…, return_lse=True)`` returned for them.
    grad_out : Array, shape of ``output.out``
        Gradient of the loss by the output.
    grad_lse : Array, shape (B, H, Nq), optional
        Gradient by the lse; None is zero.
    method, slopes, causal, scale, q_offset, k_offset, segment_ids, layout, backend
        As given to `attention`.

    Returns
    -------
    Gradients
        (q, k, v, slopes), each in its input's shape and layout; slopes is None under lsh, where
        no gradient flows through the random blocks.

    Raises
    ------
    UnsupportedByBackendError
        The backend has no gradient of its own (its framework's autograd does it, or nothing).
    TypeError, ValueError, UnknownBackendError, BackendUnavailableError
        As for `attention`.

    Notes
    -----
    Spec: ATT-25, ATT-26.

    Examples
    --------
    >>> import numpy as np, plsh
    >>> q = np.ones((1, 2, 5, 4))
    >>> output = plsh.attention(q, q, q, method="exact", return_lse=True)
    >>> grads = plsh.attention_vjp(q, q, q, output, np.ones_like(q), method="exact")
    >>> grads.q.shape, grads.slopes.shape
    ((1, 2, 5, 4), (2,))
    """
    rules.check_no_more(refused)
    call = _prepare(
        q, k, v, method, slopes, causal, scale, q_offset, k_offset, segment_ids, layout, backend
    )
    vjp = getattr(call.backend, "vjp", None)
    if call.backend.capabilities().gradients != "vjp" or vjp is None:
        raise UnsupportedByBackendError(
            f"backend {call.backend.name!r} has no gradient of its own"
            + (
                "; differentiate plsh.attention with the arrays' own autograd"
                if call.backend.capabilities().gradients == "autograd"
                else ""
            )
        )
    if not isinstance(output, tuple) or len(output) != 2:
        raise TypeError(
            "output must be the AttentionOutput of plsh.attention(…, return_lse=True), "
            f"got {type(output).__name__}"
        )
    out, lse = output
    out_shape = (*q.shape[:-1], v.shape[-1])
    lse_shape = tuple(q.shape[:-1])
    if layout == "bshd":
        lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    dtype = compat.dtype_name(q)
    wide = "float64" if dtype == "float64" else "float32"
    _check_like("output.out", out, q, out_shape, dtype)
    _check_like("output.lse", lse, q, lse_shape, wide)
    _check_like("grad_out", grad_out, q, out_shape, dtype)
    if grad_lse is not None:
        _check_like("grad_lse", grad_lse, q, lse_shape, wide)
        grad_lse = call.shape.arrange_rows(grad_lse)
    shape = call.shape
    arranged = AttentionOutput(shape.arrange(out), shape.arrange_rows(lse))
    grads = vjp(call.q, call.k, call.v, arranged, shape.arrange(grad_out), grad_lse, call.request)
    by_slope = grads.slopes
    if by_slope is not None and slopes is not None and rules.is_number(slopes):
        by_slope = by_slope.sum()  # one slope served all heads
    elif by_slope is not None and call.q.shape[0] == 0 and getattr(slopes, "ndim", 1) == 2:
        by_slope = by_slope.reshape(1, -1)[:0, ...]  # (0, H): the backend got (H,)
    by_q, by_k, by_v = (shape.restore(g) for g in (grads.q, grads.k, grads.v))
    return Gradients(by_q, by_k, by_v, by_slope)


class _Shape(NamedTuple):
    """How the caller's arrays map to (B, H, N, D) and back."""

    batched: bool
    layout: str

    def arrange(self, x: Array) -> Array:
        x = compat.swap_heads(x) if self.layout == "bshd" else x
        return x if self.batched else x[None, ...]

    def restore(self, x: Array) -> Array:
        x = x if self.batched else x[0, ...]
        return compat.swap_heads(x) if self.layout == "bshd" else x

    def arrange_rows(self, x: Array) -> Array:
        return x if self.batched else x[None, ...]

    def restore_rows(self, x: Array) -> Array:
        return x if self.batched else x[0, ...]


class _Call(NamedTuple):
    """A checked call: who runs it, on what, and how its result maps back."""

    backend: Backend
    q: Array
    k: Array
    v: Array
    request: Request
    shape: _Shape


def _prepare(
    q: Array,
    k: Array,
    v: Array,
    method: str | Method,
    slopes: Any,
    causal: bool,
    scale: float | None,
    q_offset: Any,
    k_offset: Any,
    segment_ids: Any,
    layout: str,
    backend: str | None,
) -> _Call:
    chosen = check_method(method)
    layout = rules.check_layout(layout)
    causal = rules.check_flag("causal", causal)
    kind = rules.check_arrays(q, k, v)
    rules.check_shapes(q, k, v, layout)
    shape = _Shape(q.ndim == 4, layout)
    segments = rules.check_segments(
        segment_ids,
        compat.swap_heads(q) if layout == "bshd" else q,
        compat.swap_heads(k) if layout == "bshd" else k,
        kind,
    )
    q, k, v = shape.arrange(q), shape.arrange(k), shape.arrange(v)
    batch, heads, len_q, head_dim = q.shape
    len_k = k.shape[2]
    rows = batch if shape.batched else None
    first_q, first_k = rules.check_offsets(q_offset, k_offset, (len_q, len_k), kind, rows)

    checked = rules.check_slopes(slopes, kind, rows, heads)
    weight, slope_operand, labels = resolve(chosen, checked, slopes_of(heads), heads)
    rules.check_positions(block_range(weight), causal, (first_q, first_k), (len_q, len_k), segments)
    if segments is not None:
        segments = (shape.arrange_rows(segments[0]), shape.arrange_rows(segments[1]))
    rules.check_operand_devices(q, slopes=slope_operand, q_offset=first_q, k_offset=first_k)
    static = Static(
        method=method_name(chosen),
        weight=weight,
        causal=causal,
        scale=rules.check_scale(scale, head_dim, compat.dtype_name(q)),
        heads=heads,
        kv_heads=k.shape[1],
        head_dim=head_dim,
        value_dim=v.shape[-1],
        dtype=compat.dtype_name(q),
        array_kind=kind,
    )
    runner = registry.find(backend, kind)
    _check_kind(runner, kind)
    request = Request(static, Operands(slope_operand, first_q, first_k, segments, labels))
    registry.require(runner, request)
    return _Call(runner, q, k, v, request, shape)


def _checked(call: _Call, output: Any) -> AttentionOutput:
    """Check the form of what a backend returned, so that a faulty one is named at once."""
    shape = (*call.q.shape[:3], call.v.shape[3])
    if not isinstance(output, tuple) or len(output) != 2:
        raise TypeError(
            f"backend {call.backend.name!r} must return AttentionOutput(out, lse), "
            f"got {type(output).__name__}"
        )
    for name, x, expected in zip(("out", "lse"), output, (shape, shape[:3]), strict=True):
        if compat.kind(x) != compat.kind(call.q) or tuple(x.shape) != tuple(expected):
            raise TypeError(
                f"backend {call.backend.name!r} must return {name} as a {compat.kind(call.q)} "
                f"array of shape {tuple(expected)}, got {type(x).__name__} "
                f"{getattr(x, 'shape', '')}"
            )
    return AttentionOutput(*output)


def _check_kind(backend: Backend, kind: str) -> None:
    """A named backend never converts: another kind of array is the caller's to convert."""
    taken = backend.capabilities().arrays
    if kind not in taken:
        lines = "; ".join(f"{n} = {compat.conversion(n, kind, taken[0])}" for n in "qkv")
        raise TypeError(
            f"backend {backend.name!r} takes {', '.join(taken)} arrays, got {kind}; nothing is "
            f"converted implicitly: {lines}"
        )


def _check_like(name: str, x: Array, q: Array, shape: tuple[int, ...], dtype: str) -> None:
    rules.check_is_array(name, x)
    if compat.kind(x) != compat.kind(q):
        raise TypeError(f"{name} must be a {compat.kind(q)} array like q, got {compat.kind(x)}")
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}")
    if compat.dtype_name(x) != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, got {compat.dtype_name(x)}")
    rules.check_same_device(f"q and {name}", q, x)
