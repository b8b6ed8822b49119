"""The page made of the studies' results: every verdict, every figure, tables that are whole."""

import importlib.util
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from plsh.bench import machine
from plsh.study import reduction, structure, training
from plsh.study.evaluation import MULTIPLES
from plsh.study.statistics import Interval
from plsh.study.training_claims import judge

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("report", ROOT / "tools" / "study_report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def document(name, settings, found):
    """Results as the command writes them."""
    head = {"study": name, "settings": asdict(settings), "machine": machine.facts()}
    return json.loads(json.dumps(head | found))


def structure_results():
    settings = structure.Settings(
        sigmas=(4,),
        lengths=(16, 32),
        samples=(1, 4, 16, 64),
        repeats=2,
        block_sigma=4,
        block_lengths=(32, 64),
        block_samples=(1, 4, 16),
        block_repeats=2,
        block_draws=5,
    )
    return document("structure", settings, structure.run(settings))


def reduction_results():
    settings = reduction.Settings(samples=(4, 16), time_lengths=(8, 16))
    metrics = {m: [0.5, 0.25] for m in reduction.METRICS}
    cells = [
        {"inputs": inputs, "sigma": 4.0, "method": method, "samples": s, "metrics": metrics}
        for inputs in ("random", "with |bars|")
        for method in reduction.METHODS
        for s in settings.samples
    ]
    times = [{"method": "exact", "n": n, "seconds": [0.1, 0.2]} for n in (8, 16)]
    found = {
        "cells": cells,
        "times": times,
        "exponents": {"exact": Interval(1.0, 0.9, 1.1)._asdict()},
        "claims": [],
    }
    return document("reduction", settings, found)


def training_results():
    metrics = {"bits_per_byte": 2.0, "top1": 0.5, "top10": 0.9, "mrr": 0.6, "bytes": 10}
    lengths = {str(m): metrics for m in MULTIPLES}
    runs = [
        {"arm": arm, "seed": seed, "own": lengths, "under exact": lengths, "curve": [3.0, 2.0]}
        | ({"swapped": dict.fromkeys(SWAPPED, metrics)} if arm == "exact" else {})
        for arm in ("exact", "no bias")
        for seed in range(2)
    ]
    claims = [c.plain() for c in judge(runs)]
    found = {"text": ["some text", 10, 5], "runs": runs, "claims": claims}
    return document("training", training.Settings(), found)


SWAPPED = ("exact", "window 4 sigma", "lsh s=4", "mean of outputs s=4", "fixed blocks")


def test_a_page_has_every_verdict_and_figure_and_whole_tables(report, tmp_path):
    found = {
        "structure": structure_results(),
        "reduction": reduction_results(),
        "training": training_results(),
    }
    page = report.page(found)
    for name, results in found.items():
        for claim in results["claims"]:
            assert f"| **{claim['verdict']}** | {claim['claim']} | " in page
            short = f"- **{claim['verdict']}** ({name}): {claim['claim']}: "
            assert (short in page) == (claim["verdict"] != "holds")
        made = {path.name for path in report.DRAW[name](results, tmp_path)}
        assert made == set(re.findall(rf"\(study/({name}-\w+\.png)\)", page))
    for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        counts = {line.replace("\\|", "").count("|") for line in block.splitlines()}
        assert len(counts) == 1
    assert "nan" not in page
    counts = [[c["verdict"] for c in r["claims"]].count("holds") for r in found.values()]
    assert re.findall(r"^\| (?:structure|reduction|training) \| (\d+)", page, re.MULTILINE) == [
        str(n) for n in counts
    ]


def test_a_part_without_results_is_left_out(report):
    page = report.page({"training": training_results()})
    assert "## Training" in page
    assert "## Theorem" not in page


def test_the_page_is_that_of_the_results(report):
    """After new results in docs/study: python tools/study_report.py."""
    found = report.documents()
    assert report.PAGE.exists() == bool(found)
    if found:
        assert report.PAGE.read_text(encoding="utf-8") == report.page(found)
