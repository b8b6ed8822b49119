# What the scripts for a GPU share: steps with a limit of seconds each, and what failed. Sourced in
# the root of the repository.
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

finish() {
    if ((${#failed[@]})); then
        printf 'FAILED: %s\n' "${failed[@]}"
        exit 1
    fi
    echo "everything passed in $SECONDS s"
}
