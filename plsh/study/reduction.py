"""Theorem 2.2: how far attention under the mean of masks is from ALiBi's, on many inputs.

Inputs are random, of trained models, and found by an adversary who sees the masks, since the
theorem holds for all at once. All is causal and in float64. Beside lsh stand windows of exact
ALiBi at the arithmetic of lsh, its distinct pairs, and at its bandwidth.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .. import theory
from ..attention import attention
from ..cli import cost
from ..methods import Exact, Method, PositionalLSH, Window, resolve
from .activations import Heads
from .structure import decay, shared, spectral_norm

Float = npt.NDArray[np.float64]

METHODS = ("lsh iid", "lsh stratified", "window at the pairs", "window at the bandwidth")
METRICS = (
    *("relative", "unnormalised", "row median", "row 90 %", "row 99 %"),
    *("cosine mean", "cosine 1 %", "absolute", "bound"),
)
"""Relative Frobenius errors of outputs and of numerators; relative errors and cosines of rows;
the root mean square of a row's error in units of the largest value, and the bound on it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Parameters
    ----------
    length : int
        Of the inputs.
    head_dim : int
        Of the random ones.
    sigmas : tuple of int
        Of their heads.
    spreads : tuple of float
        Standard deviations of their logits.
    samples : tuple of int
    repeats : int
        Random inputs, texts, and draws of the masks, all anew.
    adversary_length, adversary_steps : int
        Of the inputs that are optimised, and how long.
    time_lengths : tuple of int
    time_repeats : int
    """

    length: int = 1024
    head_dim: int = 64
    sigmas: tuple[int, ...] = (4, 32, 256)
    spreads: tuple[float, ...] = (1.0, 3.0)
    samples: tuple[int, ...] = (1, 4, 16, 64, 256)
    repeats: int = 5
    adversary_length: int = 256
    adversary_steps: int = 150
    time_lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768, 65536)
    time_repeats: int = 5


QUICK = Settings(
    length=256,
    head_dim=16,
    sigmas=(4, 32),
    samples=(4, 16, 64),
    repeats=3,
    adversary_length=64,
    adversary_steps=30,
    time_lengths=(1024, 2048, 4096),
    time_repeats=3,
)


class Cell(NamedTuple):
    """Errors of one kind of input, method, number of samples and sigma, for each repetition."""

    inputs: str
    sigma: float
    method: str
    samples: int
    metrics: dict[str, list[float]]


def random_heads(settings: Settings, spread: float, seed: int) -> Heads:
    """Return normal q, k, v whose logits have a standard deviation of `spread`."""
    key = np.array([seed, 0], dtype=np.uint64)
    draw = np.random.Generator(np.random.Philox(key=key))
    shape = (3, len(settings.sigmas), settings.length, settings.head_dim)
    q, k, v = draw.standard_normal(shape)
    return Heads(spread * q, k, v, tuple(1 / s for s in settings.sigmas))


class Errors:
    """The errors of methods on some heads, against exact ALiBi, which is computed once."""

    def __init__(self, heads: Heads) -> None:
        self.heads = heads
        self.n = heads.q.shape[1]
        self.out, self.lse = self._run(Exact())
        self.largest = np.linalg.norm(heads.v, axis=-1).max(-1)  # (H,)

    def _run(self, method: Method) -> tuple[Float, Float]:
        q, k, v, slopes = self.heads
        out, lse = attention(q, k, v, method=method, slopes=slopes, causal=True, return_lse=True)
        return np.asarray(out), np.asarray(lse)

    def methods(self, samples: int, seed: int) -> dict[str, Method]:
        """Return what is compared: lsh, and windows at what lsh iid costs."""
        heads = len(self.heads.slopes)
        iid = PositionalLSH(samples, sampler="iid", seed=seed)
        weight = resolve(iid, None, self.heads.slopes, heads).weight
        pairs = cost.distinct_pairs(weight, self.n, causal=True)
        widths = [cost.widest_window(p, self.n, causal=True) for p in pairs]
        reach = [min(b, self.n - 1) for b in weight.bandwidths]
        stratified = PositionalLSH(samples, seed=seed)
        made = (iid, stratified, Window(widths), Window(reach))
        return dict(zip(METHODS, made, strict=True))

    def of(self, method: Method) -> dict[str, Float]:
        """Return `METRICS` but for the bound, each ``(H,)``."""
        out, lse = self._run(method)
        wrong = np.linalg.norm(out - self.out, axis=-1)  # (H, n)
        right = np.linalg.norm(self.out, axis=-1)
        scale = self.lse.max(-1, keepdims=True)
        numerators = self.out * np.exp(self.lse - scale)[..., None]
        difference = out * np.exp(lse - scale)[..., None] - numerators
        tiny = np.finfo(np.float64).tiny
        rows = wrong / np.maximum(right, tiny)
        norms = np.maximum(right * np.linalg.norm(out, axis=-1), tiny)
        cosine = (out * self.out).sum(-1) / norms
        return {
            "relative": np.linalg.norm(wrong, axis=-1) / np.linalg.norm(right, axis=-1),
            "unnormalised": np.linalg.norm(difference, axis=(-2, -1))
            / np.linalg.norm(numerators, axis=(-2, -1)),
            "row median": np.median(rows, axis=-1),
            "row 90 %": np.quantile(rows, 0.9, axis=-1),
            "row 99 %": np.quantile(rows, 0.99, axis=-1),
            "cosine mean": cosine.mean(-1),
            "cosine 1 %": np.quantile(cosine, 0.01, axis=-1),
            "absolute": np.linalg.norm(wrong, axis=-1) / (math.sqrt(self.n) * self.largest),
        }

    def bound(self, method: PositionalLSH) -> Float:
        """Return theorem 2.2's bound of "absolute", from the error of the bias matrix, ``(H,)``."""
        q, k, v, slopes = self.heads
        errors = [bias_error(method, slopes, h, self.n) for h in range(len(slopes))]
        bound = theory.output_error_bound(np.array(errors), q, k, v, self.lse)
        return np.asarray(bound / (math.sqrt(self.n) * self.largest))


def bias_error(method: PositionalLSH, slopes: tuple[float, ...], head: int, n: int) -> float:
    """Return the spectral norm of the causal error of a head's bias matrix."""
    weight = resolve(method, None, slopes, len(slopes)).weight
    labels = np.asarray(weight.labels(0, n)[head])  # type: ignore[union-attr]
    wrong = shared(labels) / method.samples - decay(1 / slopes[head], n)
    return spectral_norm(np.tril(wrong))


def measure(
    settings: Settings,
    name: str,
    inputs: Callable[[int, int], Sequence[Heads]],
    step: Callable[[], None] = lambda: None,
) -> list[Cell]:
    """Measure one kind of input.

    Parameters
    ----------
    settings : Settings
    name : str
        Of the kind.
    inputs : callable
        From repetition and samples to attention inputs with the same slopes, such as a model's
        layers, over which errors and bounds are averaged. The iid masks of repetition r have seed
        r (of layer l of m, ``r m + l``).
    step : callable, optional
        Called after each repetition.
    """
    table: dict[tuple[float, str, int], dict[str, list[float]]] = {}
    for seed in range(settings.repeats):
        for samples in settings.samples:
            given = [Errors(heads) for heads in inputs(seed, samples)]
            found: dict[str, list[dict[str, Float]]] = {m: [] for m in METHODS}
            for layer, errors in enumerate(given):
                for method, made in errors.methods(samples, seed * len(given) + layer).items():
                    metrics = errors.of(made)
                    if method == "lsh iid" and isinstance(made, PositionalLSH):
                        metrics["bound"] = errors.bound(made)
                    found[method].append(metrics)
            for method, layers in found.items():
                for h, slope in enumerate(given[0].heads.slopes):
                    cell = table.setdefault((1 / slope, method, samples), {})
                    for metric in layers[0]:
                        mean = float(np.mean([x[metric][h] for x in layers]))
                        cell.setdefault(metric, []).append(float(f"{mean:.4g}"))
        step()
    return [Cell(name, *key, metrics) for key, metrics in table.items()]
