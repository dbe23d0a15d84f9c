#!/usr/bin/env bash
# `make test`: every suite runs even if one before it failed; the times of all stand at the end. Property tests, which only
# compute, run beside the others at the lowest priority: they take what those leave while they wait.
#
#   images/run-tests.sh PYTHON
set -uo pipefail
python=${1:?usage: images/run-tests.sh PYTHON}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Asked first: nproc answers OMP_NUM_THREADS where that is set.
cores=$(nproc)
export OMP_NUM_THREADS=1
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

# What tests leave where they can be seen by other processes; a session beside another cannot tell whose it is.
shared_files() { find /dev/shm "${TMPDIR:-/tmp}" -maxdepth 1 \( -path '/dev/shm/*' -o -name 'appliance-*' \) 2>/dev/null | sort; }

suite lint "$python" -m ruff check .
pytest=("$python" -m pytest -m 'not soak' --durations 5)
side_by_side=(--numprocesses "$cores" --maxprocesses 8 --dist worksteal)

files_before=$(shared_files)
beside_log=$(mktemp)
# A longer limit per test: the others may leave it nothing for minutes.
nice -n 19 "${pytest[@]}" --timeout 3600 --beside "${side_by_side[@]}" tests/property >"$beside_log" 2>&1 &
beside=$!
trap 'kill "$beside" 2>/dev/null; rm -f "$beside_log"' EXIT

# Its time in the summary is what it takes after the others have ended; pytest tells how long it took beside them.
finish_beside() {
    local code=0
    wait "$beside" || code=$?
    cat "$beside_log"
    left=$(comm -13 <(printf '%s\n' "$files_before") <(shared_files))
    [ -z "$left" ] || { printf 'left behind by some suite:\n%s\n' "$left"; [ "$code" != 0 ] || code=1; }
    return "$code"
}

suite unit "${pytest[@]}" "${side_by_side[@]}" tests/unit
# Two streams of whole files, where the machine has room for a box beside an engine and a training world: test_box.py is
# the longest and the second in order, so that one stream begins with it.
available_gb=$(awk '/^MemAvailable/ {print int($2 / 1000000)}' /proc/meminfo)
streams=()
[ "$cores" -lt 2 ] || [ "$available_gb" -lt 16 ] || streams=(--numprocesses 2 --dist loadfile --no-loadscope-reorder)
suite e2e "${pytest[@]}" ${streams[@]+"${streams[@]}"} tests/e2e
suite property finish_beside
printf '\n%s%-10s %5d s\n' "$summary" total "$SECONDS"
exit "$failed"
