#!/usr/bin/env bash
# All that only a GPU shows of the CuPy backend: conformance, manners, sanitizer, time and memory.
#
#     bash tests/gpu/cupy.sh            # under 6 minutes; PYTHON names another interpreter
#
# Needs CuPy with NVRTC, pytest and hypothesis; torch adds the peers that are timed, and
# compute-sanitizer the checks of memory. Ends with a table, and with 0 if everything passed.
set -u
cd "$(dirname "$0")/../.."
source tests/gpu/steps.sh

step "machine" 20 "$python" tests/gpu/cupy_run.py machine
((${#failed[@]})) && exit 1
step "compiling" 60 "$python" tests/gpu/cupy_run.py compiling
step "checks" 80 "$python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir=tests \
    tests/gpu/cupy_checks.py
step "conformance" 80 "$python" tests/gpu/cupy_run.py conformance
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck initcheck; do
        step "$tool" 15 compute-sanitizer --tool "$tool" --error-exitcode 9 \
            "$python" tests/gpu/cupy_run.py small
    done
else
    echo "== compute-sanitizer is not on PATH: not run"
fi
step "timings" 60 "$python" tests/gpu/cupy_run.py timings

finish
