"""The paper's claims on training, judged from runs that share seeds.

Arms of one seed share first weights and data, so differences are taken seed by seed; intervals
are Student's over seeds. "As good as" needs a margin: a tenth of what exact ALiBi gains over no
bias, and so is judged only where that gain is sure.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .evaluation import MULTIPLES
from .statistics import UNDECIDED, Claim, Interval, judge_above, judge_below, mean_interval

MARGIN = 0.1
"""Of the gain of exact over no bias: what "as good as" allows."""


def judge(results: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Judge every claim whose arms were run.

    Parameters
    ----------
    results : sequence of mapping
        Of `plsh.study.training.table`.
    """
    bits = _Bits(results)
    claims: list[Claim] = []

    def better(arm: str, rival: str, words: str, multiple: int = 1) -> Interval | None:
        gain = bits.difference(rival, arm, multiple)
        if gain is not None:
            claims.append(Claim(words, judge_above(gain), gain, "> 0"))
        return gain

    gain = better("exact", "no bias", "exact ALiBi is better than no bias")
    sure = gain is not None and gain.low > 0
    margin = MARGIN * gain.mean if gain is not None else 0.0

    def as_good(loss: Interval | None, words: str) -> None:
        if loss is not None:
            verdict = judge_below(loss, margin) if sure else UNDECIDED
            claims.append(Claim(words, verdict, loss, f"< {margin:.3g}"))

    for s in (4, 10, 20):
        as_good(bits.difference(f"lsh s={s}", "exact"), f"lsh s={s} is as good as exact ALiBi")
    as_good(
        bits.difference("lsh s=10 fixed", "exact"),
        "lsh s=10 with the same blocks in each step is as good as exact ALiBi",
    )
    as_good(
        bits.difference("window 4 sigma", "exact"), "a window of 4 sigma is as good as exact ALiBi"
    )
    for s in (4, 10, 20):
        better(f"lsh s={s}", "no bias", f"lsh s={s} is better than no bias")
    better("lsh s=10", "fixed blocks", "fixed blocks are worse than lsh s=10")
    better("lsh s=4", "mean of outputs s=4", "the mean of normalised outputs is worse than lsh s=4")
    for arm in ("exact", "lsh s=10", "lsh s=20", "no bias"):
        for multiple in MULTIPLES[1:]:
            as_good(
                bits.growth(arm, multiple),
                f"{arm} at {multiple} times the training length is as good as at it",
            )
    return claims


class _Bits:
    """Bits per byte of each arm under its own attention, by seed and multiple of the length."""

    def __init__(self, results: Sequence[Mapping[str, Any]]) -> None:
        self._of = {
            (r["arm"], r["seed"], m): float(r["own"][str(m)]["bits_per_byte"])
            for r in results
            for m in MULTIPLES
        }

    def _seeds(self, arm: str) -> set[int]:
        return {seed for name, seed, _ in self._of if name == arm}

    def difference(self, arm: str, other: str, multiple: int = 1) -> Interval | None:
        """Return arm - other over the seeds of both; None if there is none."""
        seeds = sorted(self._seeds(arm) & self._seeds(other))
        if not seeds:
            return None
        return mean_interval(
            [self._of[arm, s, multiple] - self._of[other, s, multiple] for s in seeds]
        )

    def growth(self, arm: str, multiple: int) -> Interval | None:
        """Return bits at a multiple of the length less those at the length itself."""
        seeds = sorted(self._seeds(arm))
        if not seeds:
            return None
        return mean_interval([self._of[arm, s, multiple] - self._of[arm, s, 1] for s in seeds])
