#!/usr/bin/env bash
# Resolves images/requirements/{cpu,cuda}.in (with overrides.txt, and cpu.in with overrides-cpu.txt) into the full lock
# files that images/install.sh installs, test.in into the packages that `make setup` adds to either, and tracking.in into
# a separate environment. Locks have the SHA-256 of each file of each package. uv resolves them; this script passes pip's
# settings on, which uv does not read.
#
#   images/lock.sh [uv pip compile options, for example --upgrade-package ray]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/requirements"
venv=$(mktemp -d)
trap 'rm -rf -- "$venv"' EXIT
python=${PYTHON:-python3}
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-user uv

# Lines of `pip config list` look like   global.extra-index-url='https://a https://b'   (or :env:.find-links=...).
main=https://pypi.org/simple more=()
while IFS='=' read -r key value; do
    value=${value#\'} value=${value%\'}
    for word in ${value//\\n/ }; do
        case ${key##*.} in
            index-url) main=$word ;;
            extra-index-url) more+=(--index "$word") ;;
            find-links) more+=(--find-links "$word") ;;
        esac
    done
done < <("$venv/bin/python" -m pip config list)
# The main index first: if two indexes have a version, uv takes the hashes of the first one, and a mirror may have files
# of only one platform.
settings=(--index "$main" ${more[@]+"${more[@]}"})
certificate=$("$venv/bin/python" -m pip config get global.cert 2>/dev/null || true)
[ -z "${PIP_CERT:-$certificate}" ] || export SSL_CERT_FILE="${PIP_CERT:-$certificate}"

# Take the best version of all indexes, like pip; uv's default uses only the first index with the package.
compile_plain() {
    "$venv/bin/uv" pip compile --universal --python-version 3.11 --no-emit-find-links --no-emit-index-url \
        --index-strategy unsafe-best-match --generate-hashes "$@"
}
compile() { compile_plain --override overrides.txt "$@"; }
for build in cpu cuda; do
    more=() less=()
    [ "$build" = cuda ] || more=(--index https://download.pytorch.org/whl/cpu) less=(--override overrides-cpu.txt)
    compile ${less[@]+"${less[@]}"} "${settings[@]}" "$@" "$build.in" -o "$build.txt" >/dev/null ||
        compile ${less[@]+"${less[@]}"} "${settings[@]}" "${more[@]}" "$@" "$build.in" -o "$build.txt" >/dev/null
done

# Tests: with the versions of both builds, and without packages that both builds have.
pins() { grep -E '^[A-Za-z0-9]' "$1" | sed -E 's/ *\\$//' | sort -u; }
pins cpu.txt | grep -vE '^(torch|vllm)' >"$venv/cpu"
pins cuda.txt | grep -vE '^(torch|vllm)' >"$venv/cuda"
cp test.txt "$venv/test.txt" 2>/dev/null || cp cpu.txt "$venv/test.txt"
compile --override overrides-cpu.txt "${settings[@]}" "$@" -c "$venv/cpu" -c "$venv/cuda" --no-annotate test.in \
    -o "$venv/test.txt" >/dev/null
comm -12 <(sed -E 's/[ =].*//' "$venv/cpu" | sort -u) <(sed -E 's/[ =].*//' "$venv/cuda" | sort -u) >"$venv/both"
awk -v both="$venv/both" '
    BEGIN { print "# Packages for the tests, in addition to cpu.txt or cuda.txt; written by images/lock.sh."
            while ((getline name < both) > 0) there[name] = 1 }
    /^#/ { next }
    /^[A-Za-z0-9]/ { split($0, part, /[ =]/); keep = !(part[1] in there) }
    keep' "$venv/test.txt" >test.txt

# A separate environment, because MLflow's client needs other versions than the box.
{
    echo "# A separate environment for experiment trackers; written by images/lock.sh."
    compile_plain "${settings[@]}" "$@" --no-annotate --no-header tracking.in
} >tracking.new
mv tracking.new tracking.txt
