"""Run the conformance suite on every backend and write what each supports into README.md.

    python tools/support_table.py            runs the suite (minutes), then writes
    python tools/support_table.py --render   writes from the reports of the last run

The table stands between two comments in README.md. The reports' summary is `docs/conformance.json`.
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


def measure():
    """Run the suite on every available backend and kind of arrays; return a summary."""
    found = []
    for info in plsh.backends():
        if not info.available:
            continue
        for arrays in info.capabilities.arrays:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "report.json"
                command = ["conformance", info.name, "--arrays", arrays, "--report", str(path)]
                subprocess.run([sys.executable, "-m", "plsh", *command], check=False)
                if not path.exists():  # no such arrays here
                    continue
                report = json.loads(path.read_text(encoding="utf-8"))
            by_status = {}
            for row in report["rows"]:
                by_status.setdefault(row["status"], []).append(row["id"])
            keys = ("backend", "arrays", "mode", "versions")
            found.append({key: report[key] for key in keys} | {"rows": by_status})
    return found


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
        said = "; ".join(map(verdict, reports)) or "not tested here"
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
    parser.add_argument("--render", action="store_true", help="run nothing")
    if not parser.parse_args().render:
        SUMMARY.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    path = ROOT / "README.md"
    summary = json.loads(SUMMARY.read_text(encoding="utf-8"))
    text = readme(path.read_text(encoding="utf-8"), summary, plsh.backends())
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
