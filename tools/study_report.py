"""Make docs/study.md and its figures of the results in docs/study.

    python tools/study_report.py             # from docs/study/*.json
    python tools/study_report.py DIR ...     # first take the results of `plsh study --output DIR`

A part whose results are not there is left out. tests/test_docs.py compares docs/study.md with what
this makes.
"""

# ruff: noqa: E501  lines of Markdown are as long as those of the other pages

import argparse
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plsh.study import figures
from plsh.study.output import measured
from plsh.study.statistics import FAILS, HOLDS, UNDECIDED

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "study"
PAGE = ROOT / "docs" / "study.md"
STUDIES = ("structure", "reduction", "training")
DRAW = {
    "structure": figures.structure,
    "reduction": figures.reduction,
    "training": figures.training,
}
HEAD = """\
# The paper's claims, measured

Wolfson & Wagner 2026 ([arXiv 2605.09472](https://arxiv.org/abs/2605.09472)) claim two theorems on positional LSH and
results of training. `plsh study` (`pip install "plsh[study]"`) turns each claim into a measurement that can fail.
This page is made from the JSON in [`docs/study`](study) by `python tools/study_report.py`; each part begins with the
command that made its JSON.

A claim **holds** if the whole 95 % interval of what was measured lies where the claim needs it, **does not hold** if
the whole interval lies outside, and is **undecided** otherwise. Intervals are Student's over independent repetitions
(seeds); those of shares are Wilson's. No correction is made for the number of claims. Negative results stay in.
In short, and all that does not hold or is undecided:
"""


def main() -> None:
    """Take results, draw the figures, write the page."""
    parser = argparse.ArgumentParser(description="Make docs/study.md and its figures.")
    parser.add_argument("results", nargs="*", type=Path, metavar="DIR")
    FOLDER.mkdir(exist_ok=True)
    for folder in parser.parse_args().results:
        for name in STUDIES:
            if (folder / f"{name}.json").exists():
                shutil.copyfile(folder / f"{name}.json", FOLDER / f"{name}.json")
    found = documents()
    for name, document in found.items():
        DRAW[name](document, FOLDER)
    PAGE.write_text(page(found), encoding="utf-8")


def documents() -> dict[str, Any]:
    """Read the results that are there."""
    paths = {name: FOLDER / f"{name}.json" for name in STUDIES}
    return {n: json.loads(p.read_text(encoding="utf-8")) for n, p in paths.items() if p.exists()}


def page(found: Mapping[str, Any]) -> str:
    """Return the page."""
    parts = {"structure": structure, "reduction": reduction, "training": training}
    told = [HEAD, summary(found), *(parts[name](document) for name, document in found.items())]
    return "\n".join(told)


# --- parts ----------------------------------------------------------------------------------------


def summary(found: Mapping[str, Any]) -> str:
    """Return how many claims have which verdict, and those that do not hold or are undecided."""
    verdicts = (HOLDS, FAILS, UNDECIDED)
    rows, rest = [], []
    for name, document in found.items():
        given = [c["verdict"] for c in document["claims"]]
        rows.append([name, *(str(given.count(v)) for v in verdicts)])
        rest += [
            f"- **{c['verdict']}** ({name}): {c['claim']}: {measured(c)}"
            for c in document["claims"]
            if c["verdict"] != HOLDS
        ]
    return "\n".join([table(("study", *verdicts), rows), "", *rest, ""])


def structure(document: Mapping[str, Any]) -> str:
    """Return the part on theorem 2.1."""
    n = max(c["n"] for c in document["errors"])
    rows = []
    for sigma, causal in sorted({(c["sigma"], c["causal"]) for c in document["errors"]}):
        for s in document["settings"]["samples"]:
            own = {
                c["sampler"]: c
                for c in document["errors"]
                if (c["sigma"], c["causal"], c["n"], c["samples"]) == (sigma, causal, n, s)
            }
            iid = own["iid"]
            rows.append(
                [
                    str(sigma),
                    "causal" if causal else "symmetric",
                    str(s),
                    *(number(x["errors"]["relative spectral"]) for x in own.values()),
                    number(iid["errors"]["spectral"]),
                    f"{iid['bound']:.3g}",
                    number(iid["errors"]["max"]),
                    f"{iid['max_bound']:.3g}",
                    number(iid["errors"]["relative frobenius"]),
                ]
            )
    head = (
        *("sigma", "", "s", "spectral, relative: iid", "stratified", "cuts"),
        *("spectral, iid", "bound on its mean", "largest entry, iid", "bound (odds 0.01)"),
        "Frobenius, relative, iid",
    )
    slopes = [
        [
            str(f["sigma"]),
            "causal" if f["causal"] else "symmetric",
            str(f["n"]),
            f["sampler"],
            f["metric"],
            f"{f['slope']['mean']:.2f} [{f['slope']['low']:.2f}, {f['slope']['high']:.2f}]",
        ]
        for f in document["slopes"]
        if f["n"] == n
    ]
    return f"""\
## Theorem 2.1: the mean of random masks

{made(document, "structure")}

{claims(document)}

![errors of the bias matrix](study/structure-errors.png)

Errors of the mean of s masks as a bias matrix, against s; bands from the least to the largest repetition. "stratified"
is this library's sampler, "cuts" places blocks by independent cuts.

![longest blocks](study/structure-blocks.png)

Means over the repetitions at n = {n}:

{table(head, rows)}

Slopes of error against s, from 4 masks on, at n = {n}, with their 95 % intervals:

{table(("sigma", "", "n", "sampler", "error", "slope"), slopes)}
"""


def reduction(document: Mapping[str, Any]) -> str:
    """Return the part on theorem 2.2."""
    metrics = [
        *("relative", "unnormalised", "row median", "row 90 %", "row 99 %"),
        *("cosine mean", "cosine 1 %", "absolute", "bound"),
    ]
    rows = []
    for name in dict.fromkeys(c["inputs"] for c in document["cells"]):
        for method in dict.fromkeys(c["method"] for c in document["cells"]):
            for s in document["settings"]["samples"]:
                own = [
                    c["metrics"]
                    for c in document["cells"]
                    if (c["inputs"], c["method"], c["samples"]) == (name, method, s)
                ]
                cells = [
                    number([x for m in own for x in m[key]]) if key in own[0] else ""
                    for key in metrics
                ]
                rows.append([name, method, str(s), *cells])
    times = [
        [r["method"], str(r["n"]), f"{np.median(r['seconds']):.3g}"] for r in document["times"]
    ]
    return f"""\
## Theorem 2.2: attention under them

{made(document, "reduction")}

{claims(document)}

![relative errors of the output](study/reduction-errors.png)

Relative Frobenius error of the output against exact ALiBi in float64, averaged over heads. Of trained models, q and k
are taken after rotary embedding and norms, each query head with the key head of its own group; scores are causal, and
masks are pooled, as the theorem has it. The windows are of
exact ALiBi, as wide as fits the distinct pairs that lsh iid scores, or as its longest block reaches. The adversary's
inputs were optimised against the masks of lsh iid, and of no other method.

![bounds](study/reduction-bounds.png)

The bound holds for all inputs with such norms of rows; it multiplies the error of the bias matrix by
exp(max |q| max |k| / sqrt(D)), so it says little where logits may be large.

![rows](study/reduction-rows.png)

![time](study/reduction-time.png)

Means over heads and repetitions; "unnormalised" is the error of the numerators, "absolute" the root mean square of a
row's error over the largest |v|, with the bound beside it:

{table(("inputs", "method", "s", *metrics), rows)}

{table(("method", "n", "seconds, median"), times)}
"""


def training(document: Mapping[str, Any]) -> str:
    """Return the part on training."""
    runs = document["runs"]
    multiples = list(runs[0]["own"])
    arms = dict.fromkeys(r["arm"] for r in runs)
    rows = []
    for arm in arms:
        own = [r for r in runs if r["arm"] == arm]
        cells = [
            spread([r[under][m]["bits_per_byte"] for r in own])
            for under in ("own", "under exact")
            for m in multiples
        ]
        first = multiples[0]
        cells += [number([r["own"][first][k] for r in own]) for k in ("top1", "top10", "mrr")]
        rows.append([arm, str(len(own)), *cells])
    head = [
        *("arm", "seeds"),
        *(f"bits per byte at {m}x" for m in multiples),
        *(f"under exact at {m}x" for m in multiples),
        *("top 1", "top 10", "MRR"),
    ]
    swapped = [r["swapped"] for r in runs if "swapped" in r]
    swaps = [
        [name, spread([s[name]["bits_per_byte"] for s in swapped])]
        for name in (swapped[0] if swapped else ())
    ]
    s = document["settings"]
    shape = s["shape"]
    source, train, held_out = document["text"]
    return f"""\
## Training

{made(document, "training")}

Byte models of {shape["layers"]} layers, width {shape["dims"]}, {shape["heads"]} heads with sigma up to
{2 ** shape["max_bias"]:g}, trained from scratch for {s["steps"]} steps of {s["batch"]} x {s["length"]} bytes on {source}
({train} bytes, repeated paragraphs left out; {held_out} held out). Arms of a seed share first weights and data. Masks
are the paper's (iid), drawn anew in each step and layer, but for "fixed", drawn once for each layer; "fixed blocks" are
of the mean width, the same in every layer. "mean of outputs" averages the normalised outputs of the masks in place of
pooling them. Evaluation is by sliding windows of 1, 2 and 4 times the training length, which all score the same bytes.

{claims(document)}

![bits per byte](study/training-bits.png)

![learning curves](study/training-curves.png)

Mean and range over seeds; "under exact" evaluates the same weights under exact ALiBi:

{table(head, rows)}

![the model trained exactly, used under other attention](study/training-swapped.png)

{table(("attention at use, trained under exact", "bits per byte at 1x"), swaps)}
"""


# --- pieces ---------------------------------------------------------------------------------------


def made(document: Mapping[str, Any], name: str) -> str:
    """Say how and where a part was made."""
    m = document["machine"]
    told = f"{m['processor']}, {m['threads']} threads, Python {m['python']}, NumPy {m['numpy']}"
    torch = f", torch {m['torch']}" if "torch" in m else ""
    return f"`plsh study {name}`; {told}{torch}; plsh {m['plsh']}."


def claims(document: Mapping[str, Any]) -> str:
    """Return the table of verdicts."""
    rows = [[f"**{c['verdict']}**", c["claim"], measured(c)] for c in document["claims"]]
    return table(("verdict", "claim", "measured [95 % interval]"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def number(values: Sequence[float]) -> str:
    """Return the mean of some numbers."""
    return f"{np.mean(values):.3g}"


def spread(values: Sequence[float]) -> str:
    """Return the mean of some numbers, and from the least to the largest."""
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
