"""The arms of the training study: what attention a model is trained under.

An arm computes attention of q, k, v under blocks named by (seed, layer, draw). Training draws
anew at each step, evaluation at each batch; `Arm.fresh` False keeps those of (seed, layer).
"""

from dataclasses import dataclass
from typing import Any

from ..attention import attention
from ..hashing import FixedBlocks, RandomBinning
from ..methods import Exact, Method, PositionalLSH, Window
from ..partition import PartitionSet

SAMPLER = "iid"
"""The paper's."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to attend.

    Parameters
    ----------
    kind : {"exact", "window", "window tol", "lsh", "no bias", "fixed blocks", "mean"}
        window tol: ALiBi but for weights below 1e-6. mean: the s outputs, each normalised on its
        own, are averaged, which is not the estimator of theorem 2.2.
    samples : int
        Masks, of lsh and mean.
    fresh : bool
        Draw for each `draw`, or once for each layer.
    """

    kind: str
    samples: int = 1
    fresh: bool = True

    @property
    def name(self) -> str:
        """How tables name it."""
        match self.kind:
            case "lsh":
                return f"lsh s={self.samples}" + ("" if self.fresh else " fixed")
            case "mean":
                return f"mean of outputs s={self.samples}"
            case "window":
                return f"window {WINDOW_SIGMAS} sigma"
        return self.kind

    def attend(
        self,
        q: Any,
        k: Any,
        v: Any,
        slopes: tuple[float, ...],
        seed: int,
        layer: int,
        draw: int,
    ) -> Any:
        """Return the causal attention of tensors ``(B, H, n, D)``."""
        key = (seed, layer, draw) if self.fresh else (seed, layer)
        if self.kind == "mean":
            return self._mean(q, k, v, slopes, key)
        method: Method = Exact()
        given: tuple[float, ...] | None = slopes
        match self.kind:
            case "lsh":
                method = PositionalLSH(self.samples, sampler=SAMPLER, seed=key)
            case "window":
                method = Window([round(WINDOW_SIGMAS / m) for m in slopes])
            case "window tol":
                method = Window()
            case "no bias":
                given = (0.0,) * len(slopes)
            case "fixed blocks":  # of the mean width, from position 0 on, in every layer
                family = FixedBlocks(tuple(2 / m for m in slopes))
                method, given = PositionalLSH(1, sampler=None, family=family), None
        return attention(q, k, v, method=method, slopes=given, causal=True)

    def _mean(self, q: Any, k: Any, v: Any, slopes: tuple[float, ...], key: tuple[int, ...]) -> Any:
        """Average the outputs of the masks: each is a query head of its own, under one mask."""
        batch, heads, n, head_dim = q.shape
        s = self.samples
        family = RandomBinning(tuple(1 / m for m in slopes))
        labels = family.sample(s, n, seed=key, sampler=SAMPLER).labels()  # (H, s, n)
        masks = PartitionSet(labels.reshape(heads * s, 1, n))
        repeated = q[:, :, None].expand(batch, heads, s, n, head_dim)
        out = attention(
            repeated.reshape(batch, heads * s, n, head_dim), k, v, method=masks, causal=True
        )
        return out.reshape(batch, heads, s, n, v.shape[-1]).mean(2)


WINDOW_SIGMAS = 4
"""Width of the window's arm in units of sigma: it scores the pairs of lsh s=4, sample by sample."""

TRAINED = (
    Arm("exact"),
    Arm("no bias"),
    Arm("lsh", 10),
    Arm("lsh", 20),
    Arm("lsh", 4),
    Arm("fixed blocks"),
    Arm("lsh", 10, fresh=False),
    Arm("window"),
    Arm("mean", 4),
)
"""The table, what most claims need first."""

SWAPPED = (
    Arm("exact"),
    Arm("window"),
    *(Arm("lsh", s) for s in (1, 4, 10, 20, 64, 256)),
    *(Arm("mean", s) for s in (4, 10, 20, 64)),
    Arm("fixed blocks"),
    Arm("no bias"),
)
"""What the model trained under exact is evaluated under, as if swapped in when it is used."""
