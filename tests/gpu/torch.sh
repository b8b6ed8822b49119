#!/usr/bin/env bash
# All that only a GPU shows of the PyTorch backends: conformance, manners, time and memory.
#
#     bash tests/gpu/torch.sh           # under 6 minutes; PYTHON names another interpreter
#
# Needs PyTorch for CUDA with Triton, pytest and hypothesis. Ends with a table, and with 0 if
# everything passed.
set -u
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD:$PWD/backends:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 PLSH_GPU=1
python=${PYTHON:-python3}
failed=()

step() {
    local name=$1 limit=$2 begin=$SECONDS
    shift 2
    echo "== $name"
    timeout "$limit" "$@" || failed+=("$name")
    echo "== $name took $((SECONDS - begin)) s"
}

step "machine" 30 "$python" tests/gpu/torch_run.py machine
((${#failed[@]})) && exit 1
step "checks" 100 "$python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir=tests \
    tests/gpu/torch_checks.py
step "conformance" 120 "$python" tests/gpu/torch_run.py conformance
step "timings" 100 "$python" tests/gpu/torch_run.py timings

if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "everything passed in $SECONDS s"
