"""Say how many results a commit has, and write the machine's facts beside them.

    python results.py COMMIT [--expect NUMBER]

A gate that measures nothing fails: so does a commit without results, one of whose benchmarks
failed, and one with another number of results than expected. n/a is no result and no failure.
"""

import argparse
import json
import math
import pathlib
import sys

from plsh.bench import facts

RESULTS = pathlib.Path(__file__).parent / "results"


def count(results):
    """Return (results, failures) of a results file of asv: null is a failure, NaN is n/a."""
    column = results["result_columns"].index("result")
    found = failed = 0
    for row in results["results"].values():
        values = [None] if row[column] is None else row[column]
        failed += sum(value is None for value in values)
        found += sum(value is not None and not math.isnan(value) for value in values)
    return found, failed


def main():
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit")
    parser.add_argument("--expect", type=int, metavar="NUMBER")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, metavar="FOLDER")
    args = parser.parse_args()
    found = failed = 0
    for path in args.results.glob("*/*-*.json"):
        results = json.loads(path.read_text(encoding="utf-8"))
        if results.get("commit_hash") == args.commit:
            counts = count(results)
            found, failed = found + counts[0], failed + counts[1]
            beside = path.parent / "facts" / f"{args.commit[:8]}.json"
            beside.parent.mkdir(exist_ok=True)
            beside.write_text(json.dumps(facts(), indent=2) + "\n", encoding="utf-8")
    print(f"commit {args.commit}: {found} results, {failed} failures")
    if failed or not found or args.expect not in (None, found):
        print(f"expected {args.expect or 'some'} results and no failures", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
