"""The rules of a call, one small function each. They run before any backend is asked.

Values are read on Python numbers, sequences and NumPy arrays only; a framework's array is judged
by its shape and dtype, so that nothing here breaks a trace. A message names the argument, the
rule and what came.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import compat
from .compat import Array
from .methods import as_slopes
from .partition import MAX_POSITION

LAYOUTS = ("bhsd", "bshd")
DTYPES = ("float16", "bfloat16", "float32", "float64")
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_NUMPY = (np.ndarray, np.generic)  # as a union, torch.compile could not trace it


_DENSE = "the n x n matrix that it needs is never formed"
_REASONS = {
    "dropout": f"there is no dropout: {_DENSE}; apply dropout to the output",
    "mask": f"there is no dense mask: {_DENSE}; use causal, segment_ids and offsets",
    "bias": f"there is no dense bias: {_DENSE}; use slopes",
    "window": "a window is a method: method=plsh.Window(width)",
    "alibi": "the argument is called slopes",
}


def check_no_more(keywords: Mapping[str, object]) -> None:
    """Refuse keywords that the call does not have, those of other libraries with the reason."""
    for name in keywords:
        reason = next((why for word, why in _REASONS.items() if word in name), None)
        raise TypeError(
            f"attention got an unexpected keyword argument {name!r}"
            + (f"; {reason}" if reason else "")
        )


def check_flag(name: str, value: object) -> bool:
    """Check a bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a bool, got {value!r}")
    return bool(value)


def check_layout(layout: object) -> str:
    """Check the name of a layout."""
    if not isinstance(layout, str):
        raise TypeError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    return layout


def check_arrays(q: Array, k: Array, v: Array) -> str:
    """Check that q, k, v are of one array kind, device and floating dtype; return the kind."""
    arrays = {"q": q, "k": k, "v": v}
    for name, x in arrays.items():
        check_is_array(name, x)
    kinds = [compat.kind(x) for x in arrays.values()]
    if len(set(kinds)) > 1:
        odd = next(n for n, x in zip("kv", kinds[1:], strict=True) if x != kinds[0])
        line = compat.conversion(odd, compat.kind(arrays[odd]), kinds[0])
        raise TypeError(
            f"q, k, v must be arrays of one kind, got {', '.join(kinds)}; nothing is converted "
            f"implicitly: {odd} = {line}"
        )
    dtypes = [compat.dtype_name(x) for x in arrays.values()]
    if len(set(dtypes)) > 1:
        raise TypeError(f"q, k, v must have one dtype, got {', '.join(dtypes)}; cast them")
    if dtypes[0] not in DTYPES:
        raise TypeError(f"q, k, v must have a dtype of {DTYPES}, got {dtypes[0]}")
    check_same_device("q, k, v", q, k, v)
    return kinds[0]


def check_is_array(name: str, x: object) -> None:
    """Check that `x` is an array, and not one of NumPy's kinds that would lose their meaning."""
    if isinstance(x, np.ma.MaskedArray | np.matrix):
        raise TypeError(
            f"{name} must be a plain array, got {type(x).__name__}, whose mask or product rule "
            f"would be ignored; pass numpy.asarray({name}), and padding as segment_ids"
        )
    if compat.kind(x) == "":
        raise TypeError(
            f"{name} must be an array, got {type(x).__name__}; pass numpy.asarray({name})"
        )
    if not compat.is_strided(x):
        if x.is_nested:  # type: ignore[attr-defined]
            raise TypeError(
                f"{name} must be a dense tensor, got a nested one; pass "
                f"{name}.to_padded_tensor(0.0), and padding as segment_ids"
            )
        raise TypeError(
            f"{name} must be a dense tensor, got layout {x.layout}; pass {name}.to_dense()"  # type: ignore[attr-defined]
        )


def check_same_device(names: str, x: Array, *others: Array) -> None:
    """Check that arrays of one kind live on one device."""
    for other in others:
        if not compat.same_device(x, other):
            raise ValueError(
                f"{names} must be on one device, got {x.device} and {other.device}; "
                "nothing is copied between devices implicitly"
            )


def check_operand_devices(q: Array, **operands: Any) -> None:
    """Check that operands that are arrays of q's kind live where q does."""
    for name, x in operands.items():
        if compat.kind(x) == compat.kind(q):
            check_same_device(f"q and {name}", q, x)


def check_shapes(q: Array, k: Array, v: Array, layout: str) -> None:
    """Check ranks first, then sizes: batch, heads, keys, D."""
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.ndim not in (3, 4):
            axes = "batch, heads, len, dim" if layout == "bhsd" else "batch, len, heads, dim"
            raise ValueError(
                f"{name} must have shape ({axes}) or the same without batch, got {tuple(x.shape)}"
            )
    if not q.ndim == k.ndim == v.ndim:
        raise ValueError(
            "q, k, v must all have a batch axis or all have none, got shapes "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    head, length = (-3, -2) if layout == "bhsd" else (-2, -3)
    if q.ndim == 4 and not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k, v must have one batch size, {_shapes(q, k, v)}")
    if k.shape[head] != v.shape[head]:
        raise ValueError(f"k and v must have one head count, {_shapes(q, k, v)}")
    if k.shape[length] != v.shape[length]:
        raise ValueError(f"k and v must have one length, {_shapes(q, k, v)}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have one head dim D, {_shapes(q, k, v)}")
    if q.shape[-1] < 1:
        raise ValueError(f"q and k must have head dim D >= 1, {_shapes(q, k, v)}")
    heads, kv_heads = q.shape[head], k.shape[head]
    if (heads % kv_heads if kv_heads else heads) != 0:
        raise ValueError(
            f"the heads of q ({heads}) must be a multiple of the heads of k and v ({kv_heads}), "
            f"{_shapes(q, k, v)} with layout={layout!r}"
        )


def _shapes(q: Array, k: Array, v: Array) -> str:
    return f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def check_scale(scale: Any, head_dim: int, dtype: str) -> float:
    """Return the scale as a float in the range of the accumulation; None is D^-1/2."""
    if scale is None:
        return float(head_dim**-0.5)
    if compat.kind(scale) not in ("", "numpy"):
        raise TypeError(
            f"scale must be a number (it is static), got a {compat.kind(scale)} array; "
            "multiply q by it and pass scale=1.0"
        )
    _check_concrete("scale", scale)
    value = compat.as_python(scale)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"scale must be a number, got {scale!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not -math.inf < number < math.inf:  # comparisons stay symbolic under torch.compile
        raise ValueError(f"scale must be finite, got {number}")
    if dtype != "float64" and abs(number) > _FLOAT32_MAX:
        raise ValueError(f"scale must be in the range of float32 for {dtype}, got {number}")
    return number


def check_slopes(slopes: Any, kind: str, batch: int | None, heads: int) -> Any:
    """Return slopes as None, tuples of floats, or a framework's array; ``(H,)`` or ``(B, H)``.

    One number is one slope for all heads.
    """
    if slopes is None:
        return None
    given = compat.kind(slopes)
    if given not in ("", "numpy"):
        if given != kind:
            raise TypeError(
                f"slopes must be numbers, a NumPy array or a {kind} array like q, got {given}: "
                f"slopes = {compat.conversion('slopes', given, kind)}"
            )
        check_is_array("slopes", slopes)
        if not compat.dtype_name(slopes).startswith(("float", "bfloat", "int", "uint")):
            raise TypeError(f"slopes must be real numbers, got dtype {slopes.dtype}")
        _check_slope_shape(tuple(slopes.shape), batch, heads)
        return compat.fill_heads(slopes, heads) if slopes.ndim == 0 else slopes
    _check_concrete("slopes", slopes)
    values = _host_values("slopes", slopes)
    if not isinstance(values, Sequence):
        return as_slopes([values]) * heads
    checked = as_slopes(values)
    shape = slopes.shape if isinstance(slopes, np.ndarray) else _nested_shape(checked)
    _check_slope_shape(shape, batch, heads)
    return checked if checked else (0.0,) * heads  # (0, H): no row reads them


def _nested_shape(values: tuple[Any, ...]) -> tuple[int, ...]:
    inner = {_nested_shape(v) if isinstance(v, tuple) else () for v in values}
    if len(inner) > 1:
        raise ValueError(f"slopes must be rectangular, got {values}")
    return (len(values), *(inner.pop() if inner else ()))


def _check_slope_shape(shape: tuple[int, ...], batch: int | None, heads: int) -> None:
    # Sizes are compared one by one: a compiler that takes them for symbols finds no tuple equal.
    if not shape or (len(shape) == 1 and shape[0] == heads):
        return
    if batch is not None and len(shape) == 2 and shape[0] == batch and shape[1] == heads:
        return
    per_batch = "" if batch is None else f" or (B, H) = ({batch}, {heads})"
    raise ValueError(f"slopes must have shape (H,) = ({heads},){per_batch}, got {shape}")


def is_number(x: Any) -> bool:
    """Whether `x` is one number: a Python number, a NumPy scalar, or a 0-d array."""
    return isinstance(x, int | float) or (
        not isinstance(x, Sequence) and getattr(x, "ndim", 0) == 0
    )


def _check_concrete(name: str, value: Any) -> None:
    """Check that a NumPy value has values: ``torch.compile`` traces it as a tensor without."""
    if compat.kind(value) == "numpy" and compat.is_traced(value):
        raise TypeError(
            f"{name} must be concrete, and torch.compile traces a NumPy array; pass Python "
            f"numbers: {name} = {name}.tolist(), outside of the compiled function"
        )


def _host_values(name: str, value: Any) -> Any:
    """Return a NumPy array, number or sequence as (nested) Python numbers."""
    if isinstance(value, _NUMPY):
        if value.dtype.kind not in "iuf" and value.dtype.name != "bfloat16":
            raise TypeError(f"{name} must be real numbers, got dtype {value.dtype}")
        return value.tolist() if value.dtype.kind in "iuf" else value.astype(float).tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_host_values(name, v) for v in value]
    if isinstance(value, str | bytes) or not isinstance(value, bool | int | float):
        raise TypeError(f"{name} must be real numbers, got {value!r}")
    return value


def check_offset(name: str, offset: Any, kind: str, batch: int | None) -> Any:
    """Return an offset as an int, a tuple of B ints, or a framework's array, 0-d or ``(B,)``."""
    given = compat.kind(offset)
    if given not in ("", "numpy"):
        if given != kind:
            raise TypeError(
                f"{name} must be an int, {batch} ints or a {kind} array like q, got {given}: "
                f"{name} = {compat.conversion(name, given, kind)}"
            )
        check_is_array(name, offset)
        if not compat.dtype_name(offset).startswith(("int", "uint")):
            raise TypeError(f"{name} must be integers, got dtype {offset.dtype}")
        _check_offset_shape(name, tuple(offset.shape), batch)
        return offset
    _check_concrete(name, offset)
    if isinstance(offset, np.ndarray) and offset.size and offset.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got dtype {offset.dtype}")
    if isinstance(offset, np.ndarray):
        _check_offset_shape(name, offset.shape, batch)
    values = offset.tolist() if isinstance(offset, np.ndarray) else offset
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        return _position(name, values)
    _check_offset_shape(name, (len(values),), batch, repr(offset))
    return tuple(_position(name, v) for v in values)


def _check_offset_shape(
    name: str, shape: tuple[int, ...], batch: int | None, came: str = ""
) -> None:
    if shape == () or (batch is not None and shape == (batch,)):
        return
    expected = "an int (there is no batch axis)" if batch is None else f"an int or {batch} ints"
    raise ValueError(f"{name} must be {expected}, got {came or f'shape {shape}'}")


def _position(name: str, value: Any) -> int:
    position = compat.as_int(value)
    if position is None:
        raise TypeError(f"{name} must be an int or one int per batch row, got {value!r}")
    if not -MAX_POSITION < position < MAX_POSITION:
        raise ValueError(f"{name} must lie inside (-2**30, 2**30), got {position}")
    return position


def check_offsets(
    q_offset: Any, k_offset: Any, lengths: tuple[int, int], kind: str, batch: int | None
) -> tuple[Any, Any]:
    """Return both offsets; q_offset=None is k_offset, for queries and keys of one length."""
    first_k = check_offset("k_offset", k_offset, kind, batch)
    if q_offset is not None:
        return check_offset("q_offset", q_offset, kind, batch), first_k
    if lengths[0] != lengths[1]:
        raise missing_offset(*lengths, first_k)
    return first_k, first_k


def missing_offset(len_q: int, len_k: int, k_offset: Any) -> ValueError:
    """Build the error for q_offset=None with unequal lengths, naming both usual choices."""
    corner = f"{len_k - len_q} + k_offset"
    if isinstance(k_offset, int):
        corner = str(len_k - len_q + k_offset)
    top = str(k_offset) if isinstance(k_offset, int) else "k_offset"
    return ValueError(
        f"q_offset must be given when the lengths differ, got {len_q} queries and {len_k} keys; "
        f"q_offset={corner} aligns the last query with the last key (bottom-right, as a cache "
        f"does), q_offset={top} the first with the first (top-left)"
    )


def check_segments(segment_ids: Any, q: Array, k: Array, kind: str) -> Any:
    """Return segment ids as a pair of arrays of q's kind, ``(B, Nq)`` and ``(B, Nk)``.

    Arrays q and k are ``(B, H, N, D)`` or ``(H, N, D)``; without batch the ids are ``(N,)``.
    """
    if segment_ids is None:
        return None
    pair = segment_ids if isinstance(segment_ids, tuple | list) else (segment_ids, segment_ids)
    if len(pair) != 2 or any(compat.kind(ids) == "" for ids in pair):
        raise TypeError(
            "segment_ids must be an integer array (B, N) or a pair of them, for queries and keys, "
            f"got {segment_ids!r}"
        )
    for ids, x, name in zip(pair, (q, k), ("queries", "keys"), strict=True):
        check_is_array("segment_ids", ids)
        given = compat.kind(ids)
        if given != kind:
            line = compat.conversion("segment_ids", given, kind)
            raise TypeError(f"segment_ids must be a {kind} array like q, got {given}: {line}")
        if compat.dtype_name(ids) == "uint64":
            raise TypeError("segment_ids must fit int64, got dtype uint64; cast them")
        if not compat.dtype_name(ids).startswith(("int", "uint")):
            raise TypeError(
                f"segment_ids must be integers (equal ids see each other, a negative id is "
                f"padding), got dtype {ids.dtype}"
            )
        shape = (x.shape[0], x.shape[-2]) if x.ndim == 4 else (x.shape[-2],)
        if tuple(ids.shape) != tuple(shape):
            raise ValueError(
                f"segment_ids of the {name} must have shape {tuple(shape)}, got {tuple(ids.shape)}"
            )
        check_same_device("q and segment_ids", x, ids)
    return tuple(pair)


def check_positions(
    blocks: tuple[int, int] | None,
    causal: bool,
    offsets: tuple[Any, Any],
    lengths: tuple[int, int],
    segment_ids: Any,
) -> None:
    """Check that visible tokens lie where blocks are defined, as far as the values are known.

    Every position is below 2^30. Under lsh `blocks` is the range of positions that have blocks,
    else None; visible tokens are inside (a query before every key sees nothing under a causal mask
    and may be outside).
    """
    ranges = []
    for side, (name, offset) in enumerate(zip(("q_offset", "k_offset"), offsets, strict=True)):
        if not isinstance(offset, int | tuple):
            return  # an array: its values are not read here
        rows = offset if isinstance(offset, tuple) else (offset,)
        if any(row + lengths[side] > MAX_POSITION for row in rows):
            raise ValueError(
                f"{name} must leave all positions below 2**30, "
                f"got {offset} with {lengths[side]} tokens"
            )
        ids = None if segment_ids is None else segment_ids[side]
        ranges.append(_visible_range(rows, lengths[side], ids))
    queries, keys = ranges
    if blocks is None or queries is None or keys is None:
        return
    (q_low, q_high), (k_low, k_high) = queries, keys
    start, stop = blocks
    low = min(k_low, max(q_low, k_low) if causal else q_low)
    if low < start or max(q_high, k_high) > stop:
        what = f"[{start}, {stop if stop < MAX_POSITION else '2**30'})"
        raise ValueError(
            f"q_offset and k_offset must keep visible positions inside {what}, where blocks "
            f"exist, got queries {q_low} … {q_high - 1}, keys {k_low} … {k_high - 1}; add one "
            "number to both offsets, or mark padding by negative segment_ids"
        )


def _visible_range(rows: tuple[int, ...], length: int, ids: Any) -> tuple[int, int] | None:
    """Return the range of positions of tokens that are not padding; None if that is unknown."""
    empty = (MAX_POSITION, -MAX_POSITION)
    if length == 0 or not rows:
        return empty
    if ids is None:
        return min(rows), max(rows) + length
    if not isinstance(ids, np.ndarray):
        return None
    real = np.atleast_2d(ids >= 0)  # (B, N) or (1, N)
    at = np.arange(length)[None, :] + np.array(rows, dtype=np.int64)[:, None]
    seen = np.broadcast_to(at, real.shape)[real]
    return (int(seen.min()), int(seen.max()) + 1) if seen.size else empty
