"""Run the conformance suite on every backend and write what each supports into README.md.

    python tools/support_table.py                  runs the suite (minutes), then writes
    python tools/support_table.py numpy torch      runs it on these backends only
    python tools/support_table.py --arrays numpy   runs it on these kinds of arrays only
    python tools/support_table.py --arrays emulator cupy    runs its kernels without a GPU
    python tools/support_table.py --render         writes from the reports of the last run

The table stands between two comments in README.md. The reports' summary is `docs/conformance.json`.
Kernels of backend "cupy" run on CuPy arrays where there is a GPU, and everywhere under the emulator
of the tests, which says so in the place of the arrays.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import plsh

ROOT = Path(__file__).parents[1]
SUMMARY = ROOT / "docs" / "conformance.json"
BEGIN, END = "<!-- support table: tools/support_table.py -->", "<!-- end of the support table -->"


EMULATOR = "emulator of a GPU"
EMULATED = """
import sys
sys.path.insert(0, "tests")
import plsh
from emulated import BACKEND
from plsh.cli import main
plsh.register_backend(BACKEND)
sys.exit(main(sys.argv[1:]))
"""
"""The command `plsh`, with the emulated backend registered."""


def measure(names, kinds):
    """Run the suite on available backends, on each of their kinds of arrays; return a summary."""
    found = []
    for info in plsh.backends():
        if names and info.name not in names:
            continue
        for arrays in info.capabilities.arrays if info.available else ():
            if not kinds or arrays in kinds:
                found += reported(["-m", "plsh"], info.name, arrays)
        if info.name == "cupy" and (not kinds or "emulator" in kinds):
            for report in reported(["-c", EMULATED], "cupy_emulated", "numpy"):
                found.append(report | {"backend": "cupy", "arrays": EMULATOR})
    return found


def reported(program, name, arrays):
    """Run the suite once; return a list of the report's summary, empty if it can't run here."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = ["conformance", name, "--arrays", arrays, "--report", str(path)]
        subprocess.run([sys.executable, *program, *command], check=False, cwd=ROOT)
        if not path.exists():  # no such arrays here
            return []
        report = json.loads(path.read_text(encoding="utf-8"))
    by_status = {}
    for row in report["rows"]:
        by_status.setdefault(row["status"], []).append(row["id"])
    return [{k: report[k] for k in ("backend", "arrays", "mode", "versions")} | {"rows": by_status}]


def table(summary, infos):
    """Return the table: what each backend declares, and what its reports say."""
    lines = [
        "| backend | arrays | dtypes | methods | gradients | transforms | conformance |",
        "|---|---|---|---|---|---|---|",
    ]
    for info in infos:
        can = info.capabilities
        if can is None:
            continue
        reports = [r for r in summary if r["backend"] == info.name]
        said = "; ".join(map(verdict, reports)) or "not run whole yet"
        cells = [
            f"`{info.name}`",
            ", ".join(can.arrays),
            ", ".join(can.dtypes),
            ", ".join(can.methods),
            can.gradients or "none",
            ", ".join(can.transforms) or "none",
            said,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(report):
    """Return the counts of one report."""
    counts = {status: len(ids) for status, ids in report["rows"].items()}
    failed = counts.get("fail", 0)
    words = [f"{counts.get('pass', 0)} pass", *([f"{failed} fail"] if failed else [])]
    return f"{report['arrays']}: {', '.join(words)}, {counts.get('not declared', 0)} not declared"


def readme(text, summary, infos):
    """Return README.md with the table put in."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(summary, infos)}\n\n{END}{after}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a backend")
    parser.add_argument("--arrays", action="append", default=[], metavar="KIND")
    parser.add_argument("--render", action="store_true", help="run nothing")
    args = parser.parse_args()
    if not args.render:
        held = json.loads(SUMMARY.read_text(encoding="utf-8")) if SUMMARY.exists() else []
        new = measure(args.names, args.arrays)
        of = {(report["backend"], report["arrays"]) for report in new}
        kept = [report for report in held if (report["backend"], report["arrays"]) not in of]
        summary = sorted(kept + new, key=lambda report: (report["backend"], report["arrays"]))
        SUMMARY.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    path = ROOT / "README.md"
    summary = json.loads(SUMMARY.read_text(encoding="utf-8"))
    text = readme(path.read_text(encoding="utf-8"), summary, plsh.backends())
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
