#!/usr/bin/env bash
# Prepare .venv and the system packages that kvant needs; a second run with nothing changed ends at once.
#
#   scripts/bootstrap.sh [demo]     "demo" leaves out what only tests, models and synthesis need
#
# Exit code 2, with one line saying what to install, where a system package is missing and may not be installed.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
scope=${1:-all}
case $scope in
    all) extras=sim,golden,llm,fpga,docs,dev ;;
    demo) extras=sim,golden,llm ;;
    *)
        echo "kvant: error: scope = '$scope': legal is one of all, demo" >&2
        exit 2
        ;;
esac

say() { printf 'kvant: %s\n' "$1" >&2; }
give_up() {
    printf 'kvant: error: %s\n' "$1" >&2
    exit 2
}

# --- an interpreter: the newest supported one, of 3.11 or later -------------------------------------------------------
is_supported() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if is_supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
}

# --- system packages --------------------------------------------------------------------------------------------------
missing_packages() {
    local python=$1
    command -v g++ >/dev/null || echo g++
    command -v make >/dev/null || echo make
    command -v perl >/dev/null || echo perl
    command -v iverilog >/dev/null || echo iverilog
    [ -e /usr/include/zlib.h ] || echo zlib1g-dev
    [ -e /usr/include/lz4.h ] || echo liblz4-dev
    if [ -z "$python" ]; then
        # A distribution whose python3 is too old may still carry a newer one beside it.
        if command -v python3 >/dev/null; then echo python3.11 python3.11-venv; else echo python3 python3-venv; fi
    elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        "$python" -c 'import sys; print("python3.%d-venv" % sys.version_info[1])'
    fi
}

install_packages() {
    local packages=("$@") as_root=()
    local advice="missing system packages; install them with: apt-get install ${packages[*]}"
    command -v apt-get >/dev/null || give_up "missing system packages, under Debian's names: ${packages[*]}"
    if [ "$(id -u)" -ne 0 ]; then
        sudo -n true 2>/dev/null || give_up "$advice"
        as_root=(sudo -n)
    fi
    local apt=(${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300)
    local log
    log=$(mktemp)
    say "installing system packages: ${packages[*]}"
    if ! { "${apt[@]}" update && "${apt[@]}" install --no-install-recommends "${packages[@]}"; } >"$log" 2>&1 </dev/null; then
        tail -n 5 "$log" >&2
        rm -f "$log"
        give_up "$advice"
    fi
    rm -f "$log"
}

python=$(find_python)
read -r -d '' -a missing < <(missing_packages "$python") || true
if [ "${#missing[@]}" -gt 0 ]; then
    install_packages "${missing[@]}"
    python=$(find_python)
fi
[ -n "$python" ] || give_up "Python 3.11 or newer is needed, found: $(python3 --version 2>&1 || echo none)"

# --- the environment --------------------------------------------------------------------------------------------------
key=$({ cat pyproject.toml scripts/bootstrap.sh; pwd; } | sha256sum | cut -d' ' -f1)
is_current() { [ -f "$venv/kvant-$1.stamp" ] && [ "$(cat "$venv/kvant-$1.stamp")" = "$key" ]; }
if { is_current "$scope" || is_current all; } && is_supported "$venv/bin/python"; then
    exit 0
fi

rm -f "$venv"/kvant-*.stamp
if ! is_supported "$venv/bin/python"; then
    say "creating $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi
say "installing Python packages (the first time takes a few minutes)"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input -e ".[$extras]" </dev/null ||
    give_up "pip could not install the packages of pyproject.toml; its messages are above"
echo "$key" >"$venv/kvant-$scope.stamp"
say "environment ready: $venv"
