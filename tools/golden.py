"""Write the golden vectors of the conformance suite: ``python tools/golden.py [DIRECTORY]``.

The source is the independent implementation in tests/hash_oracle.py, never the package itself;
attention is the dense float64 oracle on its labels. Running this changes nothing unless the
standard changes.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import hash_oracle as ho  # noqa: E402

from plsh.testing.oracle import oracle, step_weight  # noqa: E402

VECTORS = ROOT / "plsh" / "conformance" / "vectors"
LAST = (1 << 64) - 1
RANGES = ((0, 20), (1021, 1029), (1 << 29, (1 << 29) + 8), ((1 << 30) - 4, 1 << 30))
DECIMALS = 10
"""Floats are stored to 1e-10, which no order of summation changes."""

Case = dict[str, Any]


def words() -> Case:
    keys = ([0, 0], [0, 1], [1, 0], [LAST, LAST], [0x123456789ABCDEF0, 31])
    counters = ([0, 0, 0, 0], [0, 0, 0, 2], [0, 0, 5, 1], [1 << 27, 0, 0, 1], [LAST, 0, 0, 0])
    seeds = ([0], [LAST], [0, 0], [0, 1], [1, 0], [7, 31, 1000], [LAST, LAST], [1, 2, 3, 4])
    return {
        "words": [
            {"key": k, "counter": c, "words": ho.words(k, 6, c)} for k in keys for c in counters
        ],
        "seeds": [{"seed": s, "folded": ho.fold(s)} for s in seeds],
        "shift_counts": {str(s): ho.shift_count(s) for s in range(1, 401)},
    }


def partitions(
    family: str,
    parameters: dict[str, list[float]],
    samples: int,
    sampler: str | None,
    seed: int | list[int],
    head_ids: list[int],
    ranges: tuple[tuple[int, int], ...] = RANGES,
) -> Case:
    """One draw. Parameters have one entry per head; under "slope" they are ALiBi's slopes."""
    values = parameters
    if "slope" in parameters:
        values = {"sigma": [ho.sigma_of(m) for m in parameters["slope"]]}
    per_head = list(zip(*values.values(), strict=True))
    case: Case = {
        "family": family,
        "parameters": {name: [_number(x) for x in row] for name, row in parameters.items()},
        "samples": samples,
        "sampler": sampler,
        "seed": seed,
        "head_ids": head_ids,
    }
    heads = list(zip(per_head, head_ids, strict=True))
    if family == "IndependentCuts":
        case["threshold"] = [ho.cut_threshold(p[0]) for p in per_head]
    else:
        drawn = [ho.bins(family, p, samples, sampler or "iid", seed, h) for p, h in heads]
        case["width"] = [[w for w, _ in row] for row in drawn]
        case["shift"] = [[s for _, s in row] for row in drawn]
    case["labels"] = [
        {
            "start": start,
            "labels": [
                ho.labels(family, p, samples, sampler or "iid", seed, h, start, stop)
                for p, h in heads
            ],
        }
        for start, stop in ranges
    ]
    return case


def random_binning() -> list[Case]:
    name, wide = "RandomBinning", [1.0, 7.25, 256.0, 1e6]
    return [
        *(
            partitions(name, {"sigma": wide[:2]}, s, sampler, 3, [0, 1], RANGES[:2])
            for s in (1, 2, 5, 12, 16, 25)
            for sampler in ("iid", "stratified")
        ),
        partitions(name, {"sigma": wide}, 10, "stratified", [7, 31, 1000], [0, 1, 2, LAST]),
        partitions(name, {"sigma": wide}, 4, "iid", LAST, [LAST, 12, 5, 1 << 63]),
        partitions(name, {"sigma": [1e-3, 0.1, 3e9, float("inf")]}, 6, "iid", [0, 1], [0, 1, 2, 3]),
        partitions(name, {"slope": [0.5, 0.1, 2.0**-8, 0.0]}, 16, "stratified", 0, [0, 1, 2, 3]),
        partitions(name, {"slope": [1 / 3, 1e30, 1e-30]}, 5, "iid", [LAST, LAST], [9, 8, 7]),
        partitions(name, {"sigma": [32.0]}, 64, "stratified", 1, [0], RANGES[2:]),
        partitions(name, {"sigma": [2.0**20]}, 100, "stratified", 2, [4], ((1 << 28, 1 << 28),)),
    ]


def power_law_binning() -> list[Case]:
    name = "PowerLawBinning"
    two = {"r1": [1.5, 0.5], "r2": [0.1, 1.0]}
    edges = {"r1": [0.01, 50.0, 1.0], "r2": [2.0, 1e-3, 1e-6]}
    return [
        *(
            partitions(name, two, s, sampler, 11, [0, 1], RANGES[:2])
            for s in (1, 5, 16)
            for sampler in ("iid", "stratified")
        ),
        partitions(name, two, 10, "stratified", [7, 31], [LAST, 2]),
        partitions(name, edges, 12, "iid", LAST, [0, 1, LAST]),
        partitions(name, edges, 12, "stratified", [0, 0], [3, 2, 1]),
    ]


def fixed_blocks() -> list[Case]:
    half = 2.0**-25  # widths halfway between two fixed-point numbers round to the even one
    return [
        partitions("FixedBlocks", {"width": [w]}, 2, None, 5, [0])
        for w in (0.25, 1.0, 3.0, 7.3, 1 + half, 1 + 3 * half, 100.75, 2.0**30, 1e12)
    ]


def independent_cuts() -> list[Case]:
    name = "IndependentCuts"
    return [
        partitions(name, {"sigma": [1.0, 7.25]}, 3, None, 3, [0, 1]),
        partitions(name, {"sigma": [4.0, 30.0]}, 2, None, [7, 31, 1000], [LAST, 2]),
        partitions(name, {"sigma": [12.5]}, 5, None, LAST, [LAST]),
        partitions(name, {"sigma": [1e-3, float("inf")]}, 2, None, [0, 1], [0, 1]),
        partitions(name, {"sigma": [300.0, 1e5]}, 2, None, 0, [0, 1], RANGES[:2]),
        partitions(name, {"slope": [0.5, 0.1, 0.0]}, 4, None, 0, [0, 1, 2], RANGES[:2]),
    ]


def attention() -> list[Case]:
    def lsh(family: str, *parameters: float, samples: int = 5, seed: int | list[int] = 1) -> Case:
        return {
            "method": "lsh",
            "family": family,
            "parameters": list(parameters),
            "samples": samples,
            "sampler": "stratified" if family.endswith("Binning") else None,
            "seed": seed,
        }

    padded = [[0, 0, 0, 0, 1, 1, 1, -1, -1], [-1, 2, 2, 2, 2, 2, 2, 2, 3]]
    slopes = [0.5, 0.125]
    return [
        _attend(lsh("RandomBinning", 4.0), seed=0),
        _attend(lsh("RandomBinning", 4.0, samples=16, seed=[1, 2]), seed=1, causal=True),
        _attend(lsh("RandomBinning", 3.0), seed=2, causal=True, q_offset=1005, k_offset=1000, nq=4),
        _attend(lsh("RandomBinning", 2.5), seed=3, segment_ids=padded),
        _attend(lsh("PowerLawBinning", 1.5, 0.5), seed=4, causal=True, scale=1.25),
        _attend(lsh("IndependentCuts", 3.0), seed=5, q_offset=3, k_offset=0, nq=6),
        _attend(lsh("FixedBlocks", 2.75, samples=1), seed=6, causal=True),
        _attend({"method": "exact", "slopes": slopes}, seed=7, causal=True),
        _attend({"method": "exact", "slopes": slopes}, seed=8, segment_ids=padded),
        _attend({"method": "window", "slopes": slopes, "width": 3}, seed=9, causal=True),
        _attend({"method": "window", "slopes": slopes, "width": 1}, seed=10, q_offset=7, nq=4),
    ]


def _attend(
    method: Case,
    *,
    seed: int,
    nq: int = 9,
    q_offset: int = 0,
    k_offset: int = 0,
    segment_ids: list[list[int]] | None = None,
    **options: Any,
) -> Case:
    """One call: batch 2, two query heads on one key head, nq queries, 9 keys, D = 3, Dv = 2."""
    nk = 9
    shapes = {"q": (2, 2, nq, 3), "k": (2, 1, nk, 3), "v": (2, 1, nk, 2)}
    shapes |= {"grad_out": (2, 2, nq, 2), "grad_lse": (2, 2, nq)}
    given = {x: _draw((seed, i), shape) for i, (x, shape) in enumerate(shapes.items())}
    ids = None if segment_ids is None else np.array(segment_ids)
    weight: Case = {}
    if method["method"] == "lsh":
        name, parameters, s = method["family"], method["parameters"], method["samples"]
        how = (name, parameters, s, method["sampler"] or "iid", method["seed"])
        rows_q, rows_k = (
            [ho.labels(*how, h, at, at + n) for h in range(2)]
            for at, n in ((q_offset, nq), (k_offset, nk))
        )
        weight["weight"] = step_weight(rows_q, rows_k)
    else:
        weight["slopes"] = method["slopes"]
        if "width" in method:
            weight["widths"] = [method["width"]] * 2
    result = oracle(
        **given, **weight, **options, q_offset=q_offset, k_offset=k_offset, segment_ids=ids
    )
    wanted = {"out": result.out, "lse": result.lse, "grad_q": result.q, "grad_k": result.k}
    wanted |= {"grad_v": result.v, "grad_slopes": result.slopes}
    return {
        "method": method,
        "options": {**options, "q_offset": q_offset, "k_offset": k_offset},
        "segment_ids": segment_ids,
        **{name: x.tolist() for name, x in given.items()},
        **{name: None if x is None else _rounded(x.tolist()) for name, x in wanted.items()},
    }


def _draw(key: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Multiples of 1/64 in [-2, 2), from Philox words: the same on every machine."""
    count = int(np.prod(shape))
    values = [((x >> 56) - 128) / 64 for x in ho.words(key, count, (0, 0, 0, 3))]
    return np.array(values).reshape(shape)


def _rounded(x: Any) -> Any:
    """Round to `DECIMALS`; without a sign on zero; infinities, which JSON lacks, as strings."""
    if isinstance(x, list):
        return [_rounded(y) for y in x]
    return _number(round(x, DECIMALS) + 0.0)


def _number(x: float) -> float | str:
    return x if abs(x) < float("inf") else str(x)


def _cases(cases: list[Case]) -> str:
    return "[\n" + ",\n".join(map(json.dumps, cases)) + "\n]"


def _text(data: Any) -> str:
    """JSON with one case a line."""
    if isinstance(data, list):
        return _cases(data) + "\n"
    parts = (
        f"{json.dumps(name)}: {_cases(part) if isinstance(part, list) else json.dumps(part)}"
        for name, part in data.items()
    )
    return "{\n" + ",\n".join(parts) + "\n}\n"


SETS = {
    f.__name__: f
    for f in (words, random_binning, power_law_binning, fixed_blocks, independent_cuts, attention)
}


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, make in SETS.items():
        (directory / f"{name}.json").write_text(_text(make()), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else VECTORS)
