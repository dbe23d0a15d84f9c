#!/usr/bin/env bash
# `make test`: every suite runs even if one before it failed; the times of all stand at the end.
#
#   images/run-tests.sh PYTHON
set -uo pipefail
python=${1:?usage: images/run-tests.sh PYTHON}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Asked first: nproc answers OMP_NUM_THREADS where that is set.
cores=$(nproc)
export OMP_NUM_THREADS=1
# Some hundred processes import the tests and what they test: where Python may not keep what it compiles of them, each
# compiles all of it.
unset PYTHONDONTWRITEBYTECODE
summary='' failed=0

suite() {
    local name=$1 started=$SECONDS code=0
    shift
    printf '\n== %s\n' "$name"
    "$@" || code=$?
    # pytest answers 5 when a suite has no tests to run (all of them deselected).
    [ "$code" = 5 ] && code=0
    [ "$code" = 0 ] || failed=1
    summary+=$(printf '%-10s %5d s   %s' "$name" $((SECONDS - started)) "$([ "$code" = 0 ] && echo ok || echo "FAILED ($code)")")$'\n'
    [ "$code" != 130 ] || { printf '%s' "$summary"; exit 130; }
}

suite lint "$python" -m ruff check .
suite format "$python" -m ruff format --check .
suite sizes "$python" -m tests.tools.sizes
# Types keep one core busy for a minute: they are checked while the unit tests run, and told of after them.
types_told=$(mktemp)
"$python" -m mypy >"$types_told" 2>&1 &
types=$!
trap 'kill %1 2>/dev/null; rm -f "$types_told"' EXIT
types_end() {
    wait "$types"
    local code=$?
    cat "$types_told"
    return "$code"
}
# -rs: what was skipped, and why: the page where there is no browser.
pytest=("$python" -m pytest --durations 5 -rs)
side_by_side=(--numprocesses "$cores" --maxprocesses 8 --dist worksteal)
suite unit "${pytest[@]}" "${side_by_side[@]}" tests/unit
suite types types_end
suite integration "${pytest[@]}" "${side_by_side[@]}" tests/integration
suite property "${pytest[@]}" "${side_by_side[@]}" tests/property
# Two streams of whole files, where the machine has room for a box beside an engine and a training world: the longest
# come first (tests/e2e/conftest.py).
available_gb=$(awk '/^MemAvailable/ {print int($2 / 1000000)}' /proc/meminfo)
streams=()
[ "$cores" -lt 2 ] || [ "$available_gb" -lt 16 ] || streams=(--numprocesses 2 --dist loadfile --no-loadscope-reorder)
suite e2e "${pytest[@]}" ${streams[@]+"${streams[@]}"} tests/e2e
printf '\n%s%-10s %5d s\n' "$summary" total "$SECONDS"
exit "$failed"
