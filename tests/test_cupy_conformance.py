"""The conformance suite on the CUDA kernels, by the emulator."""

import pytest
from emulated import BACKEND

import plsh
from plsh.conformance.runner import run
from plsh.conformance.subject import Subject


def conform(**options):
    """Run the suite; return its rows by requirement."""
    plsh.register_backend(BACKEND)
    report = run(BACKEND.name, **options)
    failures = {row.id: row.failures for row in report.rows if row.failures}
    assert not failures
    return {row.id: row for row in report.rows}


@pytest.mark.parametrize("requirement", ["ATT-8", "ATT-17", "BCK-12"])
def test_a_requirement_is_met(requirement):
    """A quick few of every run; the slow test below has all."""
    assert conform(only=(requirement,))[requirement].status == "pass"


@pytest.mark.slow
def test_the_kernels_conform():
    """Every requirement but those of transforms, which are not declared."""
    rows = conform()
    undeclared = {name for name, row in rows.items() if row.status != "pass"}
    assert undeclared == {f"TRF-{i}" for i in range(1, 6)}


def test_head_dims_beyond_the_declared_are_not_asked_for():
    """CNF-1: the calls of the suite go up to 257, these kernels to 256."""
    plsh.register_backend(BACKEND)
    subject = Subject(BACKEND.name)
    assert subject.lacks("head dim:256") is None
    assert subject.lacks("head dim:257") == "head dim 257"
