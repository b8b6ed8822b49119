"""The model: weights of eight bits on disk, float32 in memory."""

import importlib.resources
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..alibi import slopes_of
from ..attention import attention
from ..methods import Method, PositionalLSH, check_method, resolve
from ..partition import PartitionSet

Float: TypeAlias = npt.NDArray[np.float32]
Attend: TypeAlias = Callable[[int, Any, Any, Any], Any]
"""From layer and q, k, v, each ``(1, H, n, D)`` float32, to the output of the same shape."""

BYTES = 256
_EPS = 1e-5
_FILE = "weights.npz"
_SIZES = ("heads", "max_bias", "length")


class ByteModel:
    """A causal transformer over bytes; position enters through the attention alone.

    Each layer adds ``out(attention(qkv(norm(x))))``, then ``down(gelu(up(norm(x))))``; logits of
    the next byte are the products of the last norm with the embedding.

    Parameters
    ----------
    weights : mapping of str to numpy.ndarray
        ``embedding (256, dims)``, ``norm (dims,)``, and for layer i ``i.attention_norm``,
        ``i.mlp_norm (dims,)``, ``i.qkv (3 dims, dims)``, ``i.out``, ``i.up``, ``i.down``, each as
        ``(rows, columns)`` that multiplies a column.
    heads : int
        H; the width of a head is ``dims / H``.
    max_bias : float
        Exponent of the smallest slope, as for `plsh.alibi_slopes`.
    length : int
        Of training, in bytes.

    Raises
    ------
    TypeError, ValueError
        A weight is missing or of another shape, or `heads` or `max_bias` breaks a rule.

    Examples
    --------
    >>> model = load()
    >>> logits = model.logits(b"import ", model.attention("window"))
    >>> logits.shape
    (7, 256)
    """

    def __init__(
        self, weights: Mapping[str, npt.NDArray[Any]], heads: int, max_bias: float, length: int
    ) -> None:
        self.weights: dict[str, Float] = {
            name: np.ascontiguousarray(w, dtype=np.float32) for name, w in weights.items()
        }
        self.layers = sum(name.endswith(".qkv") for name in self.weights)
        self.heads, self.max_bias, self.length = heads, max_bias, length
        self.slopes = slopes_of(heads, max_bias)
        self.dims = _check_weights(self.weights, self.layers, heads)

    def logits(self, tokens: Any, attend: Attend) -> Float:
        """Return logits of the byte after each token.

        Parameters
        ----------
        tokens : bytes or array_like of int, shape (n,)
            From 0 to 255.
        attend : callable
            From layer, q, k, v to the causal attention; `attention` makes one.

        Returns
        -------
        numpy.ndarray, shape (n, 256), float32

        Raises
        ------
        TypeError, ValueError
            The tokens are no bytes.
        """
        ids = as_bytes("tokens", tokens)
        w = self.weights
        x = w["embedding"][ids]  # (n, dims)
        for layer in range(self.layers):
            q, k, v = self._heads(_norm(x, w[f"{layer}.attention_norm"]) @ w[f"{layer}.qkv"].T)
            out = np.asarray(attend(layer, q, k, v))  # (1, H, n, D)
            x = x + out[0].swapaxes(0, 1).reshape(x.shape) @ w[f"{layer}.out"].T
            hidden = _gelu(_norm(x, w[f"{layer}.mlp_norm"]) @ w[f"{layer}.up"].T)
            x = x + hidden @ w[f"{layer}.down"].T
        logits: Float = _norm(x, w["norm"]) @ w["embedding"].T
        return logits

    def _heads(self, projected: Float) -> tuple[Float, Float, Float]:
        """Split ``(n, 3 dims)`` into q, k, v ``(1, H, n, D)``."""
        sizes = (len(projected), 3, self.heads, self.dims // self.heads)
        parts = projected.reshape(sizes).transpose(1, 2, 0, 3)
        q, k, v = np.ascontiguousarray(parts)[:, None]
        return q, k, v

    def attention(self, method: Any, **options: Any) -> Attend:
        """Return what `logits` takes: causal attention by a method of plsh.

        Parameters
        ----------
        method : str or method object
            As for `plsh.attention`, under the model's slopes; a `PartitionSet`, or `PositionalLSH`
            with a family, has widths of its own in their place. Under `PositionalLSH` layer l has
            blocks of its own, those of seed (seed, l).
        options
            For `plsh.attention`, such as ``backend="numpy"``.

        Returns
        -------
        callable
            From layer, q, k, v to the attention's output.

        Raises
        ------
        TypeError, ValueError
            The method is none, or for another number of heads; or the model itself gives an option.
        """
        calls = self.calls(method, options)

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, **calls[layer], **options)

        return attend

    def calls(self, method: Any, options: Mapping[str, Any], *given: str) -> list[dict[str, Any]]:
        """Return what each layer asks of `plsh.attention`: its method, slopes, causality.

        `options` are the caller's; what the model gives, or whoever attends (`given`), is refused.
        """
        for name in ("slopes", "causal", "layout", "return_lse", *given):
            if name in options:
                raise TypeError(f"{name} can't be chosen, the byte model gives it; leave it out")
        calls: list[dict[str, Any]] = []
        for layer in range(self.layers):
            own = of_layer(method, layer)
            resolve(own, None, self.slopes, self.heads)  # raises where the head counts differ
            slopes = None if _has_widths(own) else self.slopes
            calls.append({"method": own, "slopes": slopes, "causal": True})
        return calls


def as_bytes(name: str, tokens: Any) -> npt.NDArray[np.uint8]:
    """Return bytes, or integers from 0 to 255, as an array ``(n,)``."""
    if isinstance(tokens, bytes | bytearray):
        return np.frombuffer(tokens, np.uint8)
    ids = np.asarray(tokens)
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"{name} must be bytes or integers from 0 to 255, got {tokens!r:.80}")
    if ids.ndim != 1:
        raise ValueError(f"{name} must have shape (n,), got {ids.shape}")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < BYTES:
        raise ValueError(f"{name} must lie from 0 to 255, got {ids.min()} to {ids.max()}")
    return ids.astype(np.uint8)


def _has_widths(method: Method) -> bool:
    """Whether a method carries its own widths, so that slopes must be None."""
    if isinstance(method, PositionalLSH):
        return method.family is not None
    return isinstance(method, PartitionSet)


def _check_weights(weights: Mapping[str, Float], layers: int, heads: int) -> int:
    """Check that every weight is there, in its shape; return the width of the model."""
    embedding = weights.get("embedding", np.zeros((0, 0)))
    dims = int(embedding.shape[-1])
    if heads < 1 or dims % heads:
        raise ValueError(f"heads must divide the model's {dims} dims, got {heads}")
    shapes: dict[str, tuple[int, ...]] = {"embedding": (BYTES, dims), "norm": (dims,)}
    for i in range(layers):
        hidden = len(weights.get(f"{i}.up", ()))
        shapes |= {f"{i}.attention_norm": (dims,), f"{i}.mlp_norm": (dims,)}
        shapes |= {f"{i}.qkv": (3 * dims, dims), f"{i}.out": (dims, dims)}
        shapes |= {f"{i}.up": (hidden, dims), f"{i}.down": (dims, hidden)}
    for name, shape in shapes.items():
        if name not in weights:
            raise ValueError(f"weights must hold {name!r}, got {', '.join(weights) or 'none'}")
        if weights[name].shape != shape:
            raise ValueError(f"weights[{name!r}] must be {shape}, got {weights[name].shape}")
    odd = [name for name in weights if name not in shapes]
    if odd:
        raise ValueError(f"weights must be those of {layers} layers, got {odd[0]!r}, too")
    return dims


def of_layer(method: Any, layer: int) -> Method:
    """Return the method of a layer: positional LSH draws for each its own blocks."""
    checked: Method = check_method(method)
    if not isinstance(checked, PositionalLSH):
        return checked
    base = checked.seed if isinstance(checked.seed, tuple) else (checked.seed,)
    return PositionalLSH(
        checked.samples,
        sampler=checked.sampler,
        seed=(*base, layer),
        family=checked.family,
        head_ids=checked.head_ids,
    )


def bits_per_byte(logits: Float, tokens: Any) -> npt.NDArray[np.float64]:
    """Return the information of each token but the first under the logits before it, ``(n - 1,)``.

    Examples
    --------
    >>> bits_per_byte(np.zeros((3, 256), np.float32), b"abc").tolist()
    [8.0, 8.0]
    """
    ids = as_bytes("tokens", tokens)
    x = logits[:-1].astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    true = np.take_along_axis(x, ids[1:, None].astype(np.int64), -1)[:, 0]
    bits: npt.NDArray[np.float64] = (np.log(np.exp(x).sum(-1)) - true) / math.log(2)
    return bits


def _norm(x: Float, gain: Float) -> Float:
    size = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(_EPS))
    return np.asarray(x / size * gain, dtype=np.float32)


def _gelu(x: Float) -> Float:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.asarray(np.float32(0.5) * x * (1 + np.tanh(inner)), dtype=np.float32)


# --- files ----------------------------------------------------------------------------------------


def quantise(matrix: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int8], Float]:
    """Round each row to 8 bits of its largest entry: ``int8 (r, c)`` and its scale, ``(r,)``.

    A row too small for a scale in float32 becomes zeros; what is not finite there is refused.

    Examples
    --------
    >>> whole, scale = quantise(np.array([[1.0, -0.5]]))
    >>> whole.tolist()
    [[127, -64]]
    """
    largest = np.abs(matrix).max(axis=1)
    if not np.all(largest <= np.finfo(np.float32).max):  # nor NaN
        raise ValueError(f"matrix must be finite in float32, got entries up to {largest.max()}")
    scale = (largest / 127).astype(np.float32)
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale)
    return np.rint(matrix / scale[:, None]).astype(np.int8), scale


def save(path: str | os.PathLike[str], model: ByteModel) -> None:
    """Write a model, its matrices in 8 bits."""
    held: dict[str, npt.NDArray[Any]] = {
        "heads": np.array(model.heads),
        "max_bias": np.array(model.max_bias),
        "length": np.array(model.length),
    }
    for name, w in model.weights.items():
        if w.ndim == 2:
            held[name], held[f"{name}.scale"] = quantise(w)
        else:
            held[name] = w
    np.savez_compressed(path, **held)  # type: ignore[arg-type]


def load(path: str | os.PathLike[str] | None = None) -> ByteModel:
    """Read a model.

    Parameters
    ----------
    path : path, optional
        None: the one that ships with plsh.

    Raises
    ------
    OSError
        The file can't be read.
    ValueError
        It is none that `save` wrote.
    """
    if path is None:
        with importlib.resources.files(__package__).joinpath(_FILE).open("rb") as file:
            return _read(file)
    with Path(path).open("rb") as file:
        try:
            return _read(file)
        except (ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(
                f"path must be a file that plsh.byte_model.save wrote, got {path}: {error}"
            ) from error


def _read(file: Any) -> ByteModel:
    if not zipfile.is_zipfile(file):
        raise ValueError("it is no .npz archive, or was cut short")
    file.seek(0)
    with np.load(file, allow_pickle=False) as held:
        arrays = {name: held[name] for name in held.files}
    missing = [name for name in _SIZES if name not in arrays]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    scaled = [name for name in arrays if name.endswith(".scale")]
    scales = {name.removesuffix(".scale"): arrays.pop(name) for name in scaled}
    sizes = [arrays.pop(name).item() for name in _SIZES]
    weights = {
        name: w * scales[name][:, None] if name in scales else w for name, w in arrays.items()
    }
    return ByteModel(weights, *sizes)
