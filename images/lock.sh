#!/usr/bin/env bash
# Resolves images/requirements/{cpu,cuda}.in (with test.in and overrides.txt) into the full lock files that
# images/install.sh installs. uv does the resolving; pip's settings, which uv does not read, are handed to it.
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
settings=()
while IFS='=' read -r key value; do
    value=${value#\'} value=${value%\'}
    for word in ${value//\\n/ }; do
        case ${key##*.} in
            index-url) settings+=(--default-index "$word") ;;
            extra-index-url) settings+=(--index "$word") ;;
            find-links) settings+=(--find-links "$word") ;;
        esac
    done
done < <("$venv/bin/python" -m pip config list)
certificate=$("$venv/bin/python" -m pip config get global.cert 2>/dev/null || true)
[ -z "${PIP_CERT:-$certificate}" ] || export SSL_CERT_FILE="${PIP_CERT:-$certificate}"

for build in cpu cuda; do
    more=()
    [ "$build" = cuda ] || more=(--index https://download.pytorch.org/whl/cpu)
    # The best version of any index counts, as for pip; uv's own default looks no further than the first index.
    compile() {
        "$venv/bin/uv" pip compile --universal --python-version 3.11 --no-emit-find-links --no-emit-index-url \
            --index-strategy unsafe-best-match --override overrides.txt "$@" "$build.in" test.in -o "$build.txt"
    }
    compile "${settings[@]}" "$@" >/dev/null || compile "${settings[@]}" "${more[@]}" "$@" >/dev/null
done
