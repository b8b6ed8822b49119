"""The standard in ``spec/``: its ids, version and links, and its worked examples.

The integers of the examples are compared with the code and with a second implementation, written
here from the standard's text with Python integers and mpmath alone.
"""

import ast
import inspect
import json
import re
from fractions import Fraction
from operator import attrgetter
from pathlib import Path

import mpmath
import numpy as np
import pytest

import plsh
from plsh import backend, hashing, methods, theory

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = sorted((ROOT / "spec").glob("*.md"))
ID = r"[A-Z]{3}-[0-9]+"
DEFINED = re.compile(rf"^(?:[-*] )?\*\*({ID})\*\*", re.MULTILINE)
CITED = re.compile(rf"({ID})(?: (?:…|to) ({ID}))?")


def text(name):
    return (ROOT / "spec" / name).read_text(encoding="utf-8")


def spread(match):
    """The ids of one citation; ``HSH-1 … HSH-9`` and ``HSH-1 to HSH-9`` are nine."""
    first, last = match.group(1), match.group(2) or match.group(1)
    prefix, low = first.split("-")
    assert last.startswith(prefix + "-"), match.group(0)
    return [f"{prefix}-{n}" for n in range(int(low), int(last.split("-")[1]) + 1)]


def defined():
    return [found for path in CHAPTERS for found in DEFINED.findall(path.read_text("utf-8"))]


def docstrings():
    """Each docstring of the sources that cites the standard, with its place."""
    for path in sorted([*ROOT.glob("plsh/**/*.py"), *ROOT.glob("backends/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found = ast.get_docstring(node) or ""
                if "Spec:" in found:
                    yield f"{path.relative_to(ROOT)}:{getattr(node, 'name', '')}", found


def examples(key):
    """Worked example `key` of the standard's ``json`` blocks."""
    found = []
    for path in CHAPTERS:
        for block in re.findall(r"^```json\n(.*?)^```$", path.read_text("utf-8"), re.M | re.S):
            data = json.loads(block)
            found += [data[key]] if key in data else []
    assert len(found) == 1, f"{key} must be in one block of the standard, is in {len(found)}"
    return found[0]


# --- ids, version, links --------------------------------------------------------------------------


def test_requirement_ids_are_unique_and_numbered_without_gaps():
    numbers = {}
    for found in defined():
        prefix, number = found.split("-")
        numbers.setdefault(prefix, []).append(int(number))
    for prefix, seen in numbers.items():
        assert seen == list(range(1, len(seen) + 1)), prefix


def test_each_prefix_lives_in_the_one_chapter_that_the_contents_name():
    rows = re.findall(r"^\| \[.*?\]\((.*?)\) \| ([A-Z, ]+) \|", text("README.md"), re.MULTILINE)
    listed = {prefix: name for name, cell in rows for prefix in cell.split(", ")}
    homes = {}
    for path in CHAPTERS:
        for found in DEFINED.findall(path.read_text("utf-8")):
            homes.setdefault(found.split("-")[0], set()).add(path.name)
    assert homes == {prefix: {name} for prefix, name in listed.items()}


def test_every_chapter_is_in_the_contents():
    linked = set(re.findall(r"\]\((.*?\.md)\)", text("README.md")))
    assert linked == {path.name for path in CHAPTERS} - {"README.md"}


def test_every_id_cited_in_a_docstring_exists():
    known, cited = set(defined()), []
    for place, doc in docstrings():
        note = doc.split("Spec:", 1)[1].split("\n\n")[0]
        ids = [i for match in CITED.finditer(note) for i in spread(match)]
        assert ids, f"{place} says 'Spec:' and names no requirement"
        assert set(ids) <= known, (place, set(ids) - known)
        cited += ids
    assert {"ALB-1", "ATT-28", "HSH-9", "RED-4", "THY-7"} <= set(cited)


def test_every_id_cited_in_the_standard_exists():
    known = set(defined())
    for path in CHAPTERS:
        prose = re.sub(r"(?:RFC|SHA)-[0-9]+", "", path.read_text("utf-8"))
        for match in CITED.finditer(prose):
            assert set(spread(match)) <= known, (path.name, match.group(0))


def test_version_equals_the_code_s():
    (stated,) = re.findall(r"^Version: \*\*([0-9]+\.[0-9]+)\*\*$", text("README.md"), re.MULTILINE)
    assert stated == backend.SPEC_VERSION


def test_newest_entry_of_the_changelog_is_the_version():
    headings = re.findall(r"^## ([0-9]+\.[0-9]+)$", text("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == backend.SPEC_VERSION
    assert headings == sorted(headings, key=lambda v: [int(x) for x in v.split(".")], reverse=True)


def test_internal_links_resolve():
    for path in CHAPTERS:
        for target in re.findall(r"\]\(([^)]+)\)", path.read_text("utf-8")):
            if not target.startswith("https://"):
                name, _, anchor = target.partition("#")
                assert (path.parent / name).is_file(), (path.name, target)
                assert not anchor, f"{path.name} links to a heading: {target}; cite an id"


def signatures():
    """Each call in the standard that spells defaults and names something of the code."""
    homes, found = {**vars(theory), **vars(plsh), "family": hashing.Family}, []
    for path in CHAPTERS:
        prose = path.read_text("utf-8")
        calls = re.findall(r"^```python\n(.*?)^```$", prose, re.M | re.S)
        calls += re.findall(r"`([A-Za-z_.]+\([^`…]*=[^`…]*\))`", prose)
        for call in calls:
            name, *rest = call.partition("(")[0].split(".")
            if name in homes:
                found.append((call, attrgetter(*rest)(homes[name]) if rest else homes[name]))
    return found


@pytest.mark.parametrize(
    ("call", "real"), signatures(), ids=[real.__name__ for _, real in signatures()]
)
def test_signatures_are_those_of_the_code(call, real):
    (stated,) = ast.parse(f"def f({call.partition('(')[2].strip()}: ...").body
    parameters = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in inspect.signature(real).parameters.values()
        if p.name not in {"self", "refused"}  # ATT-23: what is refused is no parameter
    ]
    assert ast.unparse(stated.args) == str(inspect.Signature(parameters))[1:-1]


def test_signatures_are_found():
    assert len(signatures()) >= 10


# --- the hashing, written a second time from chapter 20 -------------------------------------------

MASK = (1 << 64) - 1
MULTIPLY_0, MULTIPLY_2, STEP_0, STEP_1 = (
    int(constant, 16) for constant in re.findall("0x[0-9A-F]{16}", text("20-hashing.md"))
)


def philox_words(key, counter, count):
    """HSH-1."""
    start, words = sum(c << 64 * i for i, c in enumerate(counter)), []
    while len(words) < count:
        start = (start + 1) % (1 << 256)
        c, (k0, k1) = [start >> 64 * i & MASK for i in range(4)], key
        for _ in range(10):
            a, b = MULTIPLY_0 * c[0], MULTIPLY_2 * c[2]
            c = [b >> 64 ^ c[1] ^ k0, b & MASK, a >> 64 ^ c[3] ^ k1, a & MASK]
            k0, k1 = k0 + STEP_0 & MASK, k1 + STEP_1 & MASK
        words += c
    return words[:count]


def fold(seed):
    """HSH-2."""
    base, *parts = seed if isinstance(seed, list) else [seed]
    for part in parts:
        (base,) = philox_words((base, part), (0, 0, 0, 2), 1)
    return base


def shifts_per_stratum(s):
    """HSH-3."""
    fits = [m for m in range(1, s + 1) if s % m == 0 and 100 * m * m <= 81 * s and s // m >= 5]
    return max(fits, default=1)


def draws(words, s, sampler):
    """HSH-3: for each sample its level p, and T and n_t of its shift."""
    m = 1 if sampler == "iid" else shifts_per_stratum(s)
    strata = 1 if sampler == "iid" else s // m
    u = [2 * (x >> 12) + 1 for x in words]
    return [
        (Fraction((g % strata << 53) + u[2 * g], strata << 53), (j << 53) + u[2 * g + 1], m)
        for g in range(s // m)
        for j in range(m)
    ]


def quantile(family, parameters, p):
    """HSH-5, HSH-6: the width at level p in tokens, to 50 digits."""
    level = mpmath.mpf(p.numerator) / p.denominator
    if family == "RandomBinning":
        unit, below = mpmath.mpf(parameters["sigma"]), lambda x: 1 - (1 + x) * mpmath.exp(-x)
    else:
        a = 1 + mpmath.mpf(parameters["r1"])
        unit, below = 1 / mpmath.mpf(parameters["r2"]), lambda y: 1 - (1 + a * y) * (1 + y) ** -a
    high = mpmath.mpf(1)
    while below(high) < level:
        high *= 2
    low = mpmath.mpf(0)
    for _ in range(190):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < level else (low, middle)
    return unit * low


def label(p, width, shift):
    """HSH-4."""
    block = ((p << 24) - shift) // width
    return max(0, -(-(block * width + shift) >> 24))


@pytest.fixture
def fifty_digits():
    with mpmath.workdps(60):
        yield


@pytest.mark.parametrize("case", examples("words"))
def test_words_of_the_standard(case):
    expected = case.get("words") or [int(x, 16) for x in case["hex"]]
    key, counter = tuple(case["key"]), tuple(case["counter"])
    assert philox_words(key, counter, len(expected)) == expected
    assert hashing.words(key, len(expected), (counter[0], *counter[2:])).tolist() == expected


def test_words_continue_over_many_blocks():
    assert hashing.words((3, 5), 41).tolist() == philox_words((3, 5), (0, 0, 0, 0), 41)


@pytest.mark.parametrize("case", examples("fold_seed"))
def test_folded_seeds_of_the_standard(case):
    assert fold(case["seed"]) == case["word"]
    assert hashing.fold_seed(tuple(case["seed"])) == case["word"]


def test_shift_counts_of_the_standard():
    for samples, count in examples("shift_count").items():
        assert shifts_per_stratum(int(samples)) == hashing.shift_count(int(samples)) == count


@pytest.mark.usefixtures("fifty_digits")
@pytest.mark.parametrize("case", examples("bins"))
def test_widths_shifts_and_labels_of_the_standard(case):
    width, shift = case["W"], case["S"]
    if case["sampler"] is not None:
        words = philox_words((fold(case["seed"]), case["head_id"]), (0, 0, 0, 0), 64)
        drawn = draws(words, case["samples"], case["sampler"])
        exact = [quantile(case["family"], case["parameters"], p) for p, _, _ in drawn]
        clamped = [min(max(w, 1), 1 << 30) for w in exact]
        assert [int(mpmath.nint(w * (1 << 24))) for w in clamped] == width
        assert [t * w // (m << 53) for (_, t, m), w in zip(drawn, width, strict=True)] == shift
    assert case["bandwidth"] == max(-(-w >> 24) for w in width) - 1
    rows = [
        [label(p, w, s) for p in range(len(case["labels"][0]))]
        for w, s in zip(width, shift, strict=True)
    ]
    assert rows == case["labels"]

    family = getattr(plsh, case["family"])(**case["parameters"])
    seed, ids = hashing.check_seed(case["seed"]), (case["head_id"],)
    bins = family.hash(case["samples"], case["sampler"], seed, ids)
    assert (bins.width[0].tolist(), bins.shift[0].tolist()) == (width, shift)
    assert bins.bandwidth() == (case["bandwidth"],)
    n = len(rows[0])
    keywords = {"seed": seed, "sampler": case["sampler"], "head_ids": ids}
    drawn_set = family.sample(case["samples"], n, **keywords)
    assert drawn_set.labels()[0].tolist() == case["labels"]
    later = family.sample(case["samples"], 6, start=n - 6, **keywords)
    assert later.labels()[0].tolist() == [row[n - 6 :] for row in rows]


@pytest.mark.usefixtures("fifty_digits")
@pytest.mark.parametrize("case", examples("cuts"))
def test_cuts_of_the_standard(case):
    chance = 1 - mpmath.exp(-1 / mpmath.mpf(case["sigma"]))
    assert int(mpmath.nint(chance * (1 << 53))) == case["threshold"]
    start, n = case["start"], len(case["labels"][0])
    for r, row in enumerate(case["labels"]):
        words = philox_words((fold(case["seed"]), case["head_id"]), (0, 0, r, 1), start + n)
        last, labels = 0, []
        for i, word in enumerate(words):
            last = i if i >= 1 and word >> 11 < case["threshold"] else last
            labels.append(last)
        assert labels[start:] == row
    sampled = plsh.IndependentCuts(case["sigma"]).sample(
        case["samples"], n, start=start, seed=case["seed"], head_ids=[case["head_id"]]
    )
    assert sampled.labels()[0].tolist() == case["labels"]


# --- the other examples ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", examples("alibi_slopes"))
def test_slopes_of_the_standard(case):
    assert plsh.alibi_slopes(case["heads"]).tolist() == case["slopes"]


@pytest.mark.parametrize("case", examples("window_width"))
def test_window_widths_of_the_standard(case):
    assert methods.window_width(case["slope"], case["tol"]) == case["width"]


def test_partitions_of_the_standard():
    case = examples("partition")
    one = plsh.Partition(case["start"], case["stop"], case["edges"])
    assert one.labels().tolist() == case["labels"]
    assert one.sizes().tolist() == case["sizes"]
    case = examples("partition_set")
    many = plsh.PartitionSet(case["labels"])
    assert many.bandwidth().tolist() == case["bandwidth"]
    assert [many[0, r].edges.tolist() for r in range(2)] == case["edges"]
    assert many.mean_mask(0).tolist() == case["mean_mask"]


def test_segments_of_the_standard():
    case = examples("segments")
    assert plsh.segments_from_lengths(case["lengths"], case["n"]).tolist() == case["ids"]


@pytest.mark.parametrize("case", examples("attention"), ids=lambda case: case["method"])
def test_attention_of_the_standard(case):
    zero, v = np.zeros((1, 3, 1)), np.array([[[1.0], [2.0], [4.0]]])
    method, slopes = case["method"], None
    if "labels" in case:
        method = plsh.PartitionSet(case["labels"])
    else:
        slopes = [case["slope"]]
        method = plsh.Window(case["width"]) if "width" in case else plsh.Exact()
    out, lse = plsh.attention(
        zero, zero, v, method=method, slopes=slopes, causal=case["causal"], return_lse=True
    )
    np.testing.assert_allclose(out[0, :, 0], case["out"], rtol=1e-14)
    np.testing.assert_allclose(lse[0], case["lse"], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("case", examples("theory"), ids=lambda case: case["call"])
def test_theory_of_the_standard(case):
    value = getattr(theory, case["call"])(*case["arguments"])
    assert type(value) is type(case["value"])
    assert value == pytest.approx(case["value"], rel=1e-13)
