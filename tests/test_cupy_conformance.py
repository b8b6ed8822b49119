"""The conformance suite on the CUDA kernels, by the emulator."""

import pytest
from emulated import BACKEND

import plsh
from plsh.conformance.runner import run


def conform(**options):
    """Run the suite; return its rows by requirement."""
    plsh.register_backend(BACKEND)
    report = run(BACKEND.name, **options)
    failures = {row.id: row.failures for row in report.rows if row.failures}
    assert not failures
    return {row.id: row for row in report.rows}


@pytest.mark.slow
@pytest.mark.parametrize("requirement", ["BCK-10", "BCK-11", "NUM-5", "ATT-20", "ATT-21"])
def test_what_a_backend_returns_conforms(requirement):
    """The requirements of forward and backward, one by one."""
    assert conform(only=(requirement,))[requirement].status == "pass"


@pytest.mark.slow
def test_the_kernels_conform():
    rows = conform()
    assert rows["BCK-11"].status == "pass"
