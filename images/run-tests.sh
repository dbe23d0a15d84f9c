#!/usr/bin/env bash
# `make test`: runs every suite even if an earlier one failed, and prints all times at the end.
#
#   images/run-tests.sh PYTHON
set -uo pipefail
python=${1:?usage: images/run-tests.sh PYTHON}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Before the export below, because nproc returns OMP_NUM_THREADS if it is set.
cores=$(nproc)
export OMP_NUM_THREADS=1
# Hundreds of processes import the tests and the tested modules; without cached bytecode each process would compile all
# of them.
unset PYTHONDONTWRITEBYTECODE
summary='' failed=0

suite() {
    local name=$1 started=$SECONDS code=0
    shift
    printf '\n== %s\n' "$name"
    "$@" || code=$?
    # pytest exits with 5 if a suite has no tests to run (all are deselected).
    [ "$code" = 5 ] && code=0
    [ "$code" = 0 ] || failed=1
    summary+=$(printf '%-10s %5d s   %s' "$name" $((SECONDS - started)) "$([ "$code" = 0 ] && echo ok || echo "FAILED ($code)")")$'\n'
    [ "$code" != 130 ] || { printf '%s' "$summary"; exit 130; }
}

suite lint "$python" -m ruff check .
suite format "$python" -m ruff format --check .
suite sizes "$python" -m tests.tools.sizes
# The type check takes a minute on one core: it runs during the unit tests, and is reported after them.
types_output=$(mktemp)
"$python" -m mypy >"$types_output" 2>&1 &
types=$!
trap 'kill %1 2>/dev/null; rm -f "$types_output"' EXIT
types_end() {
    wait "$types"
    local code=$?
    cat "$types_output"
    return "$code"
}
# -rs: list skipped tests with reasons, such as those of the page without a browser.
pytest=("$python" -m pytest --durations 5 -rs)
parallel=(--numprocesses "$cores" --maxprocesses 8 --dist worksteal)
suite unit "${pytest[@]}" "${parallel[@]}" tests/unit
suite types types_end
suite integration "${pytest[@]}" "${parallel[@]}" tests/integration
suite property "${pytest[@]}" "${parallel[@]}" tests/property
# Two streams of whole files, if the machine has memory for a box plus an engine and a training job; the longest files run
# first (tests/e2e/conftest.py).
available_gb=$(awk '/^MemAvailable/ {print int($2 / 1000000)}' /proc/meminfo)
streams=()
[ "$cores" -lt 2 ] || [ "$available_gb" -lt 16 ] || streams=(--numprocesses 2 --dist loadfile --no-loadscope-reorder)
suite e2e "${pytest[@]}" ${streams[@]+"${streams[@]}"} tests/e2e
printf '\n%s%-10s %5d s\n' "$summary" total "$SECONDS"
exit "$failed"
