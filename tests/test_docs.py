"""What README.md and the guides say is true: the support table is current, the code runs."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

import plsh
from plsh import registry
from plsh.conformance import runner
from plsh.conformance.requirements import requirements

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SUMMARY = json.loads((ROOT / "docs" / "conformance.json").read_text(encoding="utf-8"))


def tool(name):
    """Import a script of tools/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_support_table_is_what_the_backends_declare_and_the_reports_say():
    made = tool("support_table").readme(README, SUMMARY, plsh.backends())
    assert made == README, "python tools/support_table.py"


def test_the_reports_are_of_this_standard():
    for report in SUMMARY:
        assert report["versions"]["spec"] == plsh.backend.SPEC_VERSION, "tools/support_table.py"
        told = [name for names in report["rows"].values() for name in names]
        assert sorted(told) == sorted(requirements()), "python tools/support_table.py"
        assert "fail" not in report["rows"]


def test_the_backends_that_are_said_to_conform_have_a_report():
    assert {report["backend"] for report in SUMMARY} >= {"cupy", "numpy", "reference", "torch"}


def test_reports_of_the_emulator_say_so():
    """Without a GPU no report may look like one of CuPy arrays."""
    emulator = tool("support_table").EMULATOR
    for report in SUMMARY:
        if report["backend"] == "cupy":
            assert ("cupy" in report["versions"]) == (report["arrays"] != emulator)
            assert f"{report['arrays']}: {len(report['rows']['pass'])} pass" in README


@pytest.fixture
def mine(monkeypatch):
    """The backend of the guide, made of its Python blocks."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    text = (ROOT / "docs" / "write-a-backend.md").read_text(encoding="utf-8")
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), {"__name__": "guide"})


def test_the_backend_of_the_guide_keeps_what_the_guide_says(mine):
    """The requirements in the order in which the guide lists them."""
    report = runner.run("mine", only=("NUM-7", "ATT-21", "ATT-7", "NUM-11", "NUM-12"))
    assert report.ok, "\n".join(report.lines())


@pytest.mark.slow
def test_the_backend_of_the_guide_conforms(mine):
    report = runner.run("mine")
    assert report.ok, "\n".join(report.lines())


def test_the_guide_names_requirements_that_exist():
    text = (ROOT / "docs" / "write-a-backend.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\b[A-Z]{3}-\d+\b", text)) <= set(requirements())
