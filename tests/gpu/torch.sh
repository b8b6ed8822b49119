#!/usr/bin/env bash
# All that only a GPU shows of the PyTorch backends: conformance, manners, time and memory.
#
#     bash tests/gpu/torch.sh           # under 6 minutes; PYTHON names another interpreter
#
# Needs PyTorch for CUDA with Triton, pytest and hypothesis. Ends with a table, and with 0 if
# everything passed.
set -u
cd "$(dirname "$0")/../.."
source tests/gpu/steps.sh

step "machine" 30 "$python" tests/gpu/torch_run.py machine
((${#failed[@]})) && exit 1
step "checks" 100 "$python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir=tests \
    tests/gpu/torch_checks.py
step "conformance" 120 "$python" tests/gpu/torch_run.py conformance
step "timings" 100 "$python" tests/gpu/torch_run.py timings

finish
