#!/usr/bin/env bash
# One run of the benchmarks in this Python, of the commit that is checked out: results, with the
# machine's facts beside them, go to results/MACHINE. Options are those of `asv run`, such as
# --quick or --bench REGEX. Fails if a benchmark fails, or if there are no results.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# The benchmarks refuse to measure another commit than this one (benchmarks/common.py).
ASV_COMMIT=$(git rev-parse HEAD)
export ASV_COMMIT
git diff --quiet HEAD -- ../plsh ../backends ||
    { echo "plsh/ or backends/ differ from commit $ASV_COMMIT; commit first" >&2; exit 1; }

asv machine --yes >/dev/null
asv run --python=same --set-commit-hash "$ASV_COMMIT" --show-stderr "$@"
python results.py "$ASV_COMMIT"
