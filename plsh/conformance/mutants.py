"""The test of the suite: every mutant backend must fail the requirements that name its fault."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

from .. import registry
from ..testing.mutants import MUTANTS, Mutant
from .runner import run

__all__ = ["MutantRow", "fingerprint", "run_mutants", "table"]


@dataclass
class MutantRow:
    """What became of one mutant.

    Attributes
    ----------
    mutant : Mutant
    failed : tuple of (str, str)
        The requirements named as its killers that failed, each with a test that did.
    survives : tuple of str
        Those that did not.
    """

    mutant: Mutant
    failed: tuple[tuple[str, str], ...]
    survives: tuple[str, ...]


def run_mutants(
    progress: Callable[[int, int], None] = lambda done, total: None,
    mutants: Sequence[Mutant] = MUTANTS,
) -> list[MutantRow]:
    """Run each mutant against its named killers, in quick mode."""
    rows = []
    for done, mutant in enumerate(mutants, 1):
        rows.append(_run(mutant))
        progress(done, len(mutants))
    return rows


def _run(mutant: Mutant) -> MutantRow:
    held = dict(registry._REGISTRY)
    registry.register_backend(mutant.backend)
    try:
        report = run(mutant.name, only=mutant.killers, until_failed=True)
    finally:
        registry._REGISTRY.clear()
        registry._REGISTRY.update(held)
    failed = tuple((row.id, row.failures[0][0]) for row in report.rows if row.status == "fail")
    survives = set(mutant.killers) - {name for name, _ in failed}
    return MutantRow(mutant, failed, tuple(sorted(survives)))


def fingerprint() -> str:
    """Hash the sources of the suite and of the mutants."""
    digest = hashlib.sha256()
    for package in ("plsh.testing", "plsh.conformance"):
        for name, content in sorted(_sources(resources.files(package), "")):
            digest.update(f"{package}/{name}\0".encode() + content + b"\0")
    return digest.hexdigest()[:16]


def _sources(folder: resources.abc.Traversable, prefix: str) -> Iterable[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _sources(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith((".py", ".toml")):
            yield prefix + entry.name, entry.read_bytes()


def table(rows: Sequence[MutantRow]) -> str:
    """Return the table as a Markdown document."""
    lines = [
        "# Mutants",
        "",
        "The suite is tested by backends with one realistic fault each (`plsh.testing.mutants`):",
        "every one must fail the requirements named here, in quick mode. Made by",
        "`plsh conformance --mutants spec/mutants.md`.",
        "",
        f"Sources: `{fingerprint()}`",
        "",
        "| mutant | kind | fault | fails | by the test |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        ids = ", ".join(name for name, _ in row.failed) or "nothing"
        test = f"`{row.failed[0][1]}`" if row.failed else ""
        lines.append(
            f"| {row.mutant.name} | {row.mutant.kind} | {row.mutant.fault} | {ids} | {test} |"
        )
    return "\n".join(lines) + "\n"
