"""The model: weights of eight bits on disk, float32 in memory."""

import importlib.resources
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..alibi import slopes_of
from ..attention import attention
from ..methods import Method, PositionalLSH, check_method

Float: TypeAlias = npt.NDArray[np.float32]
Attend: TypeAlias = Callable[[int, Any, Any, Any], Any]
"""From layer and q, k, v, each ``(1, H, n, D)`` float32, to the output of the same shape."""

BYTES = 256
_EPS = 1e-5
_FILE = "weights.npz"


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
        self.dims = self.weights["embedding"].shape[1]
        self.layers = sum(name.endswith(".qkv") for name in self.weights)
        self.heads, self.max_bias, self.length = heads, max_bias, length
        self.slopes = slopes_of(heads, max_bias)

    def logits(self, tokens: Any, attend: Attend) -> Float:
        """Return logits of the byte after each token.

        Parameters
        ----------
        tokens : bytes or numpy.ndarray, shape (n,), uint8
        attend : callable
            From layer, q, k, v to the causal attention; `attention` makes one.

        Returns
        -------
        numpy.ndarray, shape (n, 256), float32
        """
        ids = np.frombuffer(tokens, np.uint8) if isinstance(tokens, bytes) else np.asarray(tokens)
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
        parts = projected.reshape(len(projected), 3, self.heads, -1).transpose(1, 2, 0, 3)
        q, k, v = np.ascontiguousarray(parts)[:, None]
        return q, k, v

    def attention(self, method: Any, **options: Any) -> Attend:
        """Return what `logits` takes: causal attention by a method of plsh under these slopes.

        Under `PositionalLSH` layer l has blocks of its own, those of seed (seed, l). `options` go
        to `plsh.attention`.
        """

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            own = of_layer(method, layer)
            return attention(q, k, v, method=own, slopes=self.slopes, causal=True, **options)

        return attend


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
    ids = np.frombuffer(tokens, np.uint8) if isinstance(tokens, bytes) else np.asarray(tokens)
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

    Examples
    --------
    >>> whole, scale = quantise(np.array([[1.0, -0.5]]))
    >>> whole.tolist()
    [[127, -64]]
    """
    scale = np.abs(matrix).max(axis=1) / 127
    scale = np.where(scale == 0, 1, scale).astype(np.float32)
    return np.rint(matrix / scale[:, None]).astype(np.int8), scale


def save(path: Path, model: ByteModel) -> None:
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


def load(path: Path | None = None) -> ByteModel:
    """Read a model.

    Parameters
    ----------
    path : Path, optional
        None: the one that ships with plsh.
    """
    if path is not None:
        with path.open("rb") as file:
            return _read(file)
    with importlib.resources.files(__package__).joinpath(_FILE).open("rb") as file:
        return _read(file)


def _read(file: Any) -> ByteModel:
    with np.load(file, allow_pickle=False) as held:
        arrays = {name: held[name] for name in held.files}
    scaled = [name for name in arrays if name.endswith(".scale")]
    scales = {name.removesuffix(".scale"): arrays.pop(name) for name in scaled}
    sizes = [arrays.pop(name).item() for name in ("heads", "max_bias", "length")]
    weights = {
        name: w * scales[name][:, None] if name in scales else w for name, w in arrays.items()
    }
    return ByteModel(weights, *sizes)
