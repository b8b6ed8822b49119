"""The conformance suite itself: what it covers, how it is called, and that faults fail it.

The mutants of `plsh.testing.mutants` run here against the requirements that name their fault; a
whole run of each backend is a test of that backend.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import plsh
from plsh.cli import main
from plsh.conformance import mutants, report, runner
from plsh.conformance.requirements import requirements
from plsh.testing.model import ModelBackend
from plsh.testing.mutants import MUTANTS

ROOT = Path(__file__).parents[1]
SPEC = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "spec").glob("*.md")))


def command(*arguments, before=""):
    """Run the command line in a fresh process; return status, output, errors."""
    code = f"import sys\n{before}\nfrom plsh.cli import main\nsys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


# --- one set of requirements ---


def test_the_list_is_that_of_the_standard():
    """That every one has a test, and every test names one of them, each run sees to."""
    assert list(requirements()) == re.findall(r"^\*\*([A-Z]{3}-\d+)\*\*", SPEC, re.MULTILINE)


def test_a_test_without_a_requirement_breaks_the_run(tmp_path, monkeypatch):
    (tmp_path / "stray.py").write_text("def test_nothing(subject):\n    pass\n")
    monkeypatch.setattr(runner, "SUITE", tmp_path)
    with pytest.raises(runner.SuiteError, match=r"stray.*no requirement"):
        runner.run("numpy")
    (tmp_path / "stray.py").write_text(
        "import pytest\n\n@pytest.mark.requirement('ATT-1')\ndef test_it(subject):\n    pass\n"
    )
    with pytest.raises(runner.SuiteError, match=r"no test for .*NUM-7"):
        runner.run("numpy")


# --- whole runs ---


@pytest.fixture(scope="module")
def numpy_report(tmp_path_factory):
    """One quick run of the command, with both forms of the report."""
    folder = tmp_path_factory.mktemp("report")
    files = [folder / "out.json", folder / "out.md"]
    done = command("conformance", "numpy", "--report", files[0], "--report", files[1])
    return *done, *(path.read_text(encoding="utf-8") for path in files)


def test_numpy_conforms(numpy_report):
    status, out, err, as_json, as_markdown = numpy_report
    assert status == 0, out + err
    found = json.loads(as_json)
    assert [row["id"] for row in found["rows"]] == list(requirements())
    assert not [row["id"] for row in found["rows"] if row["status"] == "fail"]
    (last,) = out.splitlines()[-1:]
    assert last == found["verdict"]
    assert last.startswith("numpy on numpy arrays conforms: ")
    assert found["versions"]["spec"] == plsh.backend.SPEC_VERSION
    undeclared = {row["id"] for row in found["rows"] if row["status"] == "not declared"}
    assert undeclared == {"TRF-1", "TRF-2", "TRF-3", "TRF-4", "TRF-5"}
    for row in found["rows"]:
        assert f"| {row['id']} | {row['title']} | {row['status']}" in as_markdown


def test_measured_errors_stand_beside_their_tolerances(numpy_report):
    rows = {row["id"]: row for row in json.loads(numpy_report[3])["rows"]}
    for name in ("ATT-1", "NUM-7", "NUM-8", "NUM-9"):
        worst = rows[name]["worst"]
        assert 0 < worst["error"] <= worst["tolerance"] < 1, (name, worst)


def test_progress_is_shown_on_the_standard_error(numpy_report):
    lines = [line for line in numpy_report[2].splitlines() if line]
    assert lines
    assert re.match(r"plsh conformance: numpy\b.* (\d+)/\1\b", lines[-1])  # tqdm's, or plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arrays"),
    [
        ("numpy", "numpy"),
        ("reference", "numpy"),
        ("reference", "array-api"),
        ("reference", "torch"),
        ("reference", "jax"),
    ],
)
def test_backend_conforms_in_full(name, arrays):
    status, out, err = command("conformance", name, "--arrays", arrays, "--full")
    assert status == 0, out + err


# --- verdicts and exit statuses ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nobody",), "no backend 'nobody'; registered: "),
        (("numpy", "--arrays", "torch"), "backend 'numpy' takes arrays of numpy, got 'torch'"),
        (("numpy", "--device", "cuda:7"), "backend 'numpy' has the devices cpu, got 'cuda:7'"),
        (("numpy", "--only", "ATT-999"), "no requirement 'ATT-999'"),
        (("numpy", "--report", "out.txt"), "a report ends in .json or .md, got 'out.txt'"),
        (("numpy", "--report", "no/x.json"), "--report no/x.json: there is no directory"),
        (("--mutants", "no/x.md"), "--mutants no/x.md: there is no directory"),
        (("--mutants", "."), "--mutants . exists and is not a regular file"),
        ((), "give the NAME of a backend"),
    ],
)
def test_wrong_usage_is_status_2_and_one_line(arguments, message, capsys):
    assert main(["conformance", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


class Unavailable(ModelBackend):
    """A backend whose library is missing."""

    name = "unavailable"

    def availability(self):
        return plsh.backend.Availability(False, "no device; plug one in")


def test_an_unavailable_backend_is_status_2(capsys):
    plsh.register_backend(Unavailable())
    assert main(["conformance", "unavailable"]) == 2
    assert "no device; plug one in" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["pytest", "hypothesis"])
def test_without_its_libraries_it_is_status_2(module):
    status, _, err = command("conformance", "numpy", before=f"sys.modules['{module}'] = None")
    assert status == 2
    assert f'it needs {module}: pip install "plsh[conformance]"' in err


class Refusing(ModelBackend):
    """A backend that declares nothing, and so is not tested."""

    name = "refusing"

    def capabilities(self):
        return plsh.backend.Capabilities(arrays=("numpy",), dtypes=(), methods=())


def test_what_declares_nothing_does_not_pass():
    plsh.register_backend(Refusing())
    found = runner.run("refusing", only=("NUM-7", "ATT-21", "NUM-11"))
    assert not found.ok
    assert not found.ids("pass")


def test_a_fault_is_status_1_and_shown(capsys):
    mutant = next(m for m in MUTANTS if m.name == "counts_in_half")
    plsh.register_backend(mutant.backend)
    assert main(["conformance", mutant.name, "--only", mutant.killers[0]]) == 1
    out = capsys.readouterr().out
    assert re.search(rf"^{mutant.killers[0]} +fail ", out, re.MULTILINE)
    assert "does not conform" in out.splitlines()[-1]


def test_python_dash_m_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "plsh.conformance", "numpy", "--only", "HSH-1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "passes the selected requirements: 1 pass, 0 fail" in done.stdout


# --- expected failures ---


def expectations(tmp_path, text):
    path = tmp_path / "expected.txt"
    path.write_text(text)
    return ["--expected-failures", str(path)]


def test_an_expected_failure_passes(tmp_path, capsys):
    mutant = next(m for m in MUTANTS if m.name == "counts_in_half")
    plsh.register_backend(mutant.backend)
    file = expectations(tmp_path, f"# It is known.\n{mutant.killers[0]}\n")
    assert main(["conformance", mutant.name, "--only", mutant.killers[0], *file]) == 1
    assert "was not tested" in capsys.readouterr().out  # nothing passed
    only = ["--only", mutant.killers[0], "--only", "HSH-1"]
    assert main(["conformance", mutant.name, *only, *file]) == 0
    assert "fails only as expected" in capsys.readouterr().out


def test_an_expected_failure_that_passes_is_an_error(tmp_path, capsys):
    file = expectations(tmp_path, "# It was so once.\nHSH-1\n")
    assert main(["conformance", "numpy", "--only", "HSH-1", *file]) == 1
    assert "it is listed as a failure, and passes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# a reason\nATT-999\n", "no requirement 'ATT-999'"),
        ("HSH-1\n", "expected.txt:1: 'HSH-1' has no reason; write one above it"),
        ("# a reason\n\nHSH-1\n", "expected.txt:3: 'HSH-1' has no reason"),
    ],
)
def test_a_bad_file_of_expected_failures_is_status_2(tmp_path, capsys, text, message):
    assert main(["conformance", "numpy", *expectations(tmp_path, text)]) == 2
    assert message in capsys.readouterr().err


# --- the mutants ---


LONG = {
    "bfloat16_as_float16", "cotangents_scaled_in_place", "dense_backward", "every_call_kept",
    "gradient_by_slopes_under_lsh", "large_values_overflow", "lse_rounded_backward",
    "output_reused", "padded_queries_read", "padded_values_read", "segments_of_row0",
}  # fmt: skip
"""Mutants whose requirements have long tests."""


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, id=m.name, marks=[pytest.mark.slow] * (m.name in LONG)) for m in MUTANTS],
)
def test_mutant_fails_every_requirement_that_names_its_fault(mutant):
    (row,) = mutants.run_mutants(mutants=[mutant])
    assert row.survives == ()


def test_there_are_mutants_of_every_kind():
    kinds = {m.kind for m in MUTANTS}
    assert len(MUTANTS) >= 40
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    assert kinds >= {
        "positions", "blocks", "weights", "pooling", "gradients", "heads", "tiles", "precision",
        "masks", "options", "state", "types", "errors",
    }  # fmt: skip


@pytest.mark.slow
def test_the_model_without_a_fault_conforms():
    """So that it is the fault that fails, and not the model."""
    plsh.register_backend(ModelBackend())
    found = runner.run(ModelBackend.name)
    assert found.ok, "\n".join(found.lines())


def test_the_table_of_mutants_is_current():
    text = (ROOT / "spec" / "mutants.md").read_text(encoding="utf-8")
    assert f"Sources: `{mutants.fingerprint()}`" in text, (
        "plsh conformance --mutants spec/mutants.md"
    )
    rows = re.findall(r"^\| (\w+) \|", text, re.MULTILINE)
    assert rows == ["mutant", *(m.name for m in MUTANTS)]


# --- reports ---


def test_a_report_needs_a_known_form(tmp_path):
    empty = report.Report("x", "numpy", "", "quick", 0.0, {}, "", [])
    with pytest.raises(ValueError, match=r"ends in \.json or \.md"):
        empty.write(tmp_path / "out.txt")
