#!/usr/bin/env bash
# Installs the appliance and everything it needs into a virtual environment. Bare metal, the Dockerfiles, the systemd
# unit, `make setup` and the tests all use this script.
#
#   images/install.sh [--venv DIR] [--build cpu|cuda] [--python PYTHON] [--no-compile] [--packages-only] [--print-commands]
#                     [--production] [--unhashed-torch] [--wheelhouse DIR]
#
#   VENV, APPLIANCE_BUILD, PYTHON   the same as the options; options take precedence
#   --production                    leave out packages that only tests need (images/requirements/test.txt)
#   --unhashed-torch                allow your own build of torch, whose SHA-256 is not in the lock
#   --wheelhouse DIR                install offline from the directory that `make wheelhouse` filled; implies
#                                   --production, and installs the appliance's wheel instead of this checkout
#
# The set of packages is the full lock file images/requirements/<build>.txt, installed by plain pip with --no-deps and
# --require-hashes, so files that are not in the lock are refused. All pip settings of the user apply:
# pip.conf, PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_CERT, ... (uv would be faster, but ignores
# them). Packages come only from package registries.
#
# A second run without changes ends at once; an interrupted run continues where it stopped.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(dirname "$here")
venv=${VENV:-$project/.venv}
build=${APPLIANCE_BUILD:-}
wanted_python=${PYTHON:-}
compile=1
packages_only=0
production=0
unhashed_torch=0
wheelhouse=
dry=0
arguments=("$@")

say() { printf 'install: %s\n' "$*" >&2; }
die() { printf 'install: error: %s\n' "$*" >&2; exit 1; }
run() { if [ "$dry" = 1 ]; then printf '%q ' "$@"; printf '\n'; else "$@"; fi; }

while [ $# -gt 0 ]; do
    case $1 in
        --venv) venv=${2:?--venv needs a directory}; shift 2 ;;
        --build) build=${2:?--build needs cpu or cuda}; shift 2 ;;
        --python) wanted_python=${2:?--python needs an interpreter}; shift 2 ;;
        --no-compile) compile=0; shift ;;
        --packages-only) packages_only=1; shift ;; # for image layers: everything but the appliance itself
        --production) production=1; shift ;;
        --unhashed-torch) unhashed_torch=1; shift ;;
        --wheelhouse) wheelhouse=$(realpath -- "${2:?--wheelhouse needs a directory}"); production=1; shift 2 ;;
        --print-commands) dry=1; shift ;;
        -h | --help) sed -n '2,21s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) die "unknown option $1; see --help" ;;
    esac
done
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac

# --- which build ---------------------------------------------------------------------------------------------------
if [ -z "$build" ]; then
    if [ -e /dev/nvidia0 ] || [[ $(nvidia-smi -L 2>/dev/null || true) == *GPU* ]]; then
        build=cuda
    else
        build=cpu
    fi
fi
lock=$here/requirements/$build.txt
case $build in
    cpu) need_gb=6 torch_index=https://download.pytorch.org/whl/cpu ;;
    cuda) need_gb=20 torch_index= ;;
    *) die "APPLIANCE_BUILD or --build is '$build'; expected cpu or cuda" ;;
esac
own_wheel=
if [ -n "$wheelhouse" ]; then
    torch_index=
    own_wheel=$(ls "$wheelhouse"/appliance-*.whl 2>/dev/null) || die "$wheelhouse has no wheel of the appliance"
fi
[ "$(uname -s)" = Linux ] || die "this is $(uname -s); the appliance needs Linux (shared memory, process groups)"

# --- which Python --------------------------------------------------------------------------------------------------
fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }
python=
for candidate in ${wanted_python:-python3 python3.12 python3.11 python3.13 python}; do
    if fits "$candidate"; then python=$(command -v "$candidate"); break; fi
done
if [ -z "$python" ]; then
    found=$(for c in ${wanted_python:-python3}; do "$c" --version 2>&1 || true; done)
    die "no Python 3.11, 3.12 or 3.13 found (${wanted_python:-python3} is: ${found:-absent}). Install one, for example" \
        "'apt-get install python3.11 python3.11-venv', or set PYTHON=/path/to/python3.11"
fi

# --- already done? -------------------------------------------------------------------------------------------------
digest() { cat "$@" | sha256sum | cut -c1-64; }
stamp=$venv/.appliance-installed
project_stamp="$(digest "${own_wheel:-$project/pyproject.toml}") ${own_wheel:-$project}"
[ "$packages_only" = 0 ] || project_stamp='packages only'
clear=()
if [ -L "$venv/bin/python" ] && ! fits "$venv/bin/python"; then
    say "$venv has no working Python 3.11 to 3.13 (its interpreter was removed or has another version); recreating it"
    clear=(--clear)
fi
# Comments of the lock do not count: a regenerated lock with the same versions installs nothing.
locks=("$lock")
[ "$production" = 1 ] || locks+=("$here/requirements/test.txt")
lock_stamp="$build $(cat "${locks[@]}" | grep -vE '^ *#' | sha256sum | cut -c1-64)"
done_lock='' done_project=''
if [ -f "$stamp" ]; then { IFS= read -r done_lock && IFS= read -r done_project; } <"$stamp" || true; fi
if [ "$dry" = 0 ] && [ "$done_lock" = "$lock_stamp" ] && [ "$done_project" = "$project_stamp" ]; then
    exit 0
fi

# --- what the system must have -------------------------------------------------------------------------------------
has_library() { "$python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$1" 2>/dev/null; }
if [ "$dry" = 0 ] && [ "$build" = cpu ] && ! has_library libnuma.so.1; then
    die "libnuma.so.1 is missing, vLLM's CPU build needs it: 'apt-get install libnuma1' or 'dnf install numactl-libs'"
fi
if [ "$dry" = 0 ] && [ "$build" = cuda ]; then
    if ! command -v cc >/dev/null && ! command -v gcc >/dev/null; then
        die "no C compiler (cc or gcc): Triton compiles GPU kernels with it when models load: 'apt-get install gcc'"
    fi
    headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -f "$headers/Python.h" ] ||
        die "$headers/Python.h is missing, Triton needs it: 'apt-get install python3-dev' for the version of $python"
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1 || true)
    case $driver in
        '' | *[!0-9]*) ;;
        *) [ "$driver" -ge 580 ] ||
            die "NVIDIA driver $driver found; the CUDA 13 build needs 580 or newer, and a box refuses an older one." \
                "Update it (Debian, Ubuntu: 'apt-get install nvidia-driver-580'), or install the CPU build with" \
                "APPLIANCE_BUILD=cpu" ;;
    esac
fi

# Two concurrent runs (`make demo` and `make test`) must not write to the same environment.
if [ "$dry" = 0 ]; then
    mkdir -p "$venv" || die "cannot create $venv"
    exec 9>"$venv/.installing" || die "cannot write into $venv"
    if command -v flock >/dev/null && ! flock -n 9; then
        say "another installation into $venv is running; waiting for it"
        flock 9
        # The environment has changed since the checks above, so start over.
        exec "${BASH_SOURCE[0]}" ${arguments[@]+"${arguments[@]}"}
    fi
    if [ "$done_lock" != "$lock_stamp" ]; then
        free_kb=$(df -Pk "$(dirname "$venv")" | awk 'NR == 2 {print $4}')
        used_kb=$( (du -sk "$venv" 2>/dev/null || echo 0) | awk 'NR == 1 {print $1}')
        [ $(((free_kb + used_kb) / 1048576)) -ge "$need_gb" ] ||
            die "$(dirname "$venv") has $((free_kb / 1048576)) GB free; the $build build needs about $need_gb GB"
    fi
fi

# --- environment ---------------------------------------------------------------------------------------------------
# Debian packages ensurepip separately. Without it the system's pip installs into the environment, because a pip from an
# index would have no hash.
pip_command() {
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        pip=("$venv/bin/python" -m pip)
    elif "$python" -m pip --python "$venv/bin/python" --version >/dev/null 2>&1; then
        pip=("$python" -m pip --python "$venv/bin/python")
    else
        return 1
    fi
}
pip=("$venv/bin/python" -m pip)
if [ ${#clear[@]} -gt 0 ] || [ ! -x "$venv/bin/python" ] || ! pip_command; then
    say "creating $venv with $python ($("$python" --version 2>&1))"
    if "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        run "$python" -m venv "${clear[@]}" "$venv"
    elif "$python" -c 'import venv, pip' 2>/dev/null; then
        run "$python" -m venv "${clear[@]}" --without-pip "$venv"
    else
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        die "$python cannot create virtual environments: 'apt-get install python$version-venv' (Debian, Ubuntu)"
    fi
fi

[ "$dry" = 1 ] || pip_command || die "$python has no pip that can install into $venv"
# --no-user: `user = true` in a pip.conf would fail in a virtual environment.
pip+=(--disable-pip-version-check install --no-user --no-deps --no-compile)
[ -z "$wheelhouse" ] || pip+=(--no-index --find-links "$wheelhouse")

# Shorten pip's two thousand lines to a counter (on a terminal) or an occasional line; errors stay on stderr.
progress() {
    local terminal=0
    [ ! -t 2 ] || terminal=1
    awk -v total="$1" -v terminal="$terminal" '
        function show(text) { printf(terminal ? "\r\033[Kinstall:   %s" : "install:   %s\n", text) >"/dev/stderr" }
        /^(Collecting|Requirement already satisfied)/ { n++; if (terminal || n % 50 == 0) show(n " of " total) }
        /^Building wheel/ { show($0) }
        /^Installing collected packages/ { show("unpacking") }
        END { if (terminal) printf("\r\033[K") >"/dev/stderr" }'
}
pip_install() {
    local total=$1
    shift
    if [ "$dry" = 1 ]; then run "${pip[@]}" "$@"; else "${pip[@]}" "$@" 2> >(quieter >&2) | progress "$total"; fi
}
# An index on a file system may lack directories; drop pip's warning for each package and index.
quieter() { grep -v 'is ignored: it is neither a file nor a directory' || true; }

# Print a package of the lock with its hashes.
in_lock() { awk -v begin="$1==" 'index($0, begin) == 1 { on = 1 } on { print } on && !/\\$/ { exit }' "$lock"; }

if [ "$done_lock" != "$lock_stamp" ]; then
    [ "$dry" = 1 ] || rm -f "$stamp"
    # A run that was killed during unpacking leaves metadata without RECORD, which pip would treat as installed.
    if [ "$dry" = 0 ]; then
        for metadata in "$venv"/lib/python3*/site-packages/*.dist-info; do
            [ ! -d "$metadata" ] || [ -f "$metadata/RECORD" ] || rm -rf -- "$metadata"
        done
    fi

    torch=$(sed -nE 's/^torch==([^ ;]+).*/\1/p' "$lock" | head -n 1)
    [ -n "$torch" ] || die "$lock has no line 'torch==...'; 'make lock' writes it"
    say "installing the $build build: torch $torch"
    [ "$dry" = 1 ] || in_lock setuptools >"$venv/.setuptools.txt"
    # Packages without a wheel (DeepSpeed) are built here with the lock's setuptools; an isolated build would fetch and
    # run the newest setuptools without checking a hash.
    pip_install 1 --require-hashes -r "$venv/.setuptools.txt" ||
        die "the setuptools of $lock could not be installed (see pip's message above)"
    # A requirements file of its own, because pip reads hashes only from files.
    wanted_torch=(--require-hashes -r "$venv/.torch===$torch.txt")
    if [ "$unhashed_torch" = 1 ]; then
        say "WARNING: --unhashed-torch: torch $torch from your index or find-links is installed UNCHECKED"
        wanted_torch=("torch===$torch")
    elif [ "$dry" = 0 ]; then
        in_lock torch | sed 's/^torch==/torch===/' >"$venv/.torch===$torch.txt"
    fi
    # torch first, with `===`: otherwise pip would prefer a CPU build (+cpu) in the user's find-links to the CUDA build of
    # the same version.
    if ! pip_install 1 "${wanted_torch[@]}"; then
        [ -n "$torch_index" ] ||
            die "torch $torch could not be installed from your package index (see pip's message above; if it is about" \
                "hashes and you trust the wheel, use --unhashed-torch)"
        say "torch $torch is not in your package index; trying $torch_index"
        pip_install 1 --extra-index-url "$torch_index" "${wanted_torch[@]}" ||
            die "torch $torch was not found in your index, your find-links or $torch_index, or does not have" \
                "the SHA-256 of the lock (see pip's message above). Put its wheel for" \
                "$("$venv/bin/python" --version) into a directory and set PIP_FIND_LINKS to it; if you trust a wheel" \
                "that is not in the lock (only the one for Python 3.11 on x86_64 is), use --unhashed-torch"
    fi
    say "installing the other packages of $(basename "$lock"); this takes a minute or two"
    options=(--no-build-isolation --require-hashes)
    for file in "${locks[@]}"; do options+=(-r "$file"); done
    pip_install "$(cat "${locks[@]}" | grep -E '^[A-Za-z0-9]' | grep -vc "'never'")" "${options[@]}" ||
        die "pip could not install ${locks[*]} (see its message above); a second run continues here"
fi

if [ "$packages_only" = 0 ]; then
    say "installing the appliance itself"
    own=(--no-build-isolation --editable "$project")
    [ -z "$own_wheel" ] || own=(--force-reinstall "$own_wheel")
    pip_install 1 "${own[@]}" || die "pip could not install the appliance (see its message above)"
fi

# --- byte-compile --------------------------------------------------------------------------------------------------
# Without .pyc files the first start of a box takes 15 to 20 s longer, and so does every start if Python cannot write them
# (PYTHONDONTWRITEBYTECODE, a read-only image). Tests and the hundreds of model families that a box never imports are
# compiled at first use; sympy, tensorboard, torch's inductor and quantisation are compiled here, because torch, vLLM and
# DeepSpeed import them.
if [ "$compile" = 1 ] && [ "$done_lock" != "$lock_stamp" ]; then
    say "byte-compiling"
    run "$venv/bin/python" -m compileall -q -j 0 \
        -x "$(cat "$here/requirements/not-compiled.txt")" \
        "$venv"/lib/python3*/site-packages || true
fi
if [ "$compile" = 1 ] && [ "$packages_only" = 0 ]; then
    sources=$project
    [ -z "$own_wheel" ] || sources=$(echo "$venv"/lib/python3*/site-packages)
    run "$venv/bin/python" -m compileall -q "$sources"/{appliance,runtime,scheduler,serve,train,weights} || true
fi

# --- does it work? -------------------------------------------------------------------------------------------------
if [ "$dry" = 0 ]; then
    failure=$("$venv/bin/python" -c 'import torch, ray, safetensors, openai' 2>&1) ||
        die "the environment in $venv was installed but does not import: $(printf '%s' "$failure" | tail -n 3)"
    printf '%s\n%s\n' "$lock_stamp" "$project_stamp" >"$stamp.partial"
    mv -f "$stamp.partial" "$stamp"
    say "done: $venv ($build build)"
fi
