# shellcheck shell=bash
# What try.sh and test.sh share: find Python, say what will be downloaded, set up a virtual environment and Slurm once.
# Sourced, never run. Everything it says goes to standard error; standard output belongs to the program that follows.

set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=${PCTOOL_VENV:-$ROOT/.venv}
TORCH_INDEX_URL=${TORCH_INDEX_URL:-}
YES=
[[ ${CI:-} == true ]] && YES=1
CONSTRAINTS=$ROOT/bootstrap/constraints.txt
SLURM_PACKAGES=(slurmctld slurmd slurm-client munge)
SLURM_COMMANDS=(slurmctld slurmd munged sbatch srun scontrol squeue)

# Megabytes, measured with pip 23.2 on Python 3.11, x86_64, in November 2026.
RUN_MB=45          # jinja2, PyYAML, rich, submitit, numpy, boto3, awscrt and what they need
DEV_MB=140         # those, and pytest, mypy, ruff, moto, shellcheck, transformers, lightning
TORCH_CPU_MB=205   # torch's CPU build and what it needs
TORCH_CUDA_MB=3000 # torch as the default index has it for x86_64, with the CUDA libraries it needs
LISTS_MB=10        # apt's package lists
SLURM_MB=5         # where apt cannot tell before it has fetched its lists

PLAN=()   # lines to show before anything is done
ASK=      # set if the plan changes the system, or is a very large download
APT=()    # packages to install with apt-get
LOG=      # where the output of long commands goes
MAKE=     # new or anew if the environment has to be made, anew after what is in it was removed
MADE=pctool-made.stamp # in environments that were made here: no other is ever cleared

say() { printf '%s\n' "$*" >&2; }

die() { # die CODE WHAT [FIX]
    say "${0##*/}: $2"
    [[ -n ${3:-} ]] && say "  -> $3"
    exit "$1"
}

last_line() { tail -n 20 "$1" | grep -v WARNING | tail -n 1 | tr -d '\r\n' | cut -c 1-90; }

# Run a long command with its output in a log, and show how far it is: a line that rewrites itself on a terminal, else a
# line every 15 s. On failure print the end of the log. Ctrl-C ends all that the command has started, or, with --whole,
# lets it finish, and then goes no further.
step() { # step [--whole] LABEL COMMAND...
    local whole='' interrupted='' log=$LOG began=$SECONDS last=0 code=0 label pid
    [[ $1 == --whole ]] && whole=1 && shift
    label=$1
    shift
    say "$label ..."
    trap 'interrupted=1' INT TERM HUP
    set -m # a process group of its own: a function such as as_root is a subshell, which what it runs would outlive
    "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    set +m
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2 || true # how often the line is redrawn; Ctrl-C ends it early, and the command is waited for below
        if [[ $interrupted == 1 && -n $whole ]]; then
            interrupted=told
            say "  this is not interrupted: it takes some seconds, and torn it would have to be repaired"
        elif [[ -n $interrupted && -z $whole ]]; then
            end_group "$pid"
            exit 130
        elif [[ -t 2 ]]; then
            printf '\r\033[K  %d s  %s' $((SECONDS - began)) "$(last_line "$log")" >&2
        elif ((SECONDS - began - last >= 15)); then
            last=$((SECONDS - began))
            say "  $last s  $(last_line "$log")"
        fi
    done
    wait "$pid" || code=$?
    trap - INT TERM HUP
    [[ -t 2 ]] && printf '\r\033[K' >&2
    if ((code)); then
        tail -n 25 "$log" | cut -c 1-200 >&2
        die 3 "$label: failed with code $code" "the whole output is in $log"
    fi
    [[ -z $interrupted ]] || exit 130
    say "  done in $((SECONDS - began)) s"
}

# End a process group and wait until it has gone: until then it holds apt's lock, and ours on the checkout.
end_group() { # end_group PID
    local round
    signal_group TERM "$1"
    for ((round = 0; round < 25; round++)); do # 5 s
        kill -0 -- "-$1" 2>/dev/null || return 0
        sleep 0.2 || true
    done
    signal_group KILL "$1"
}

signal_group() { # signal_group SIGNAL PID
    kill "-$1" -- "-$2" 2>/dev/null || true
    # what sudo has started is root's, which only root may end
    ((EUID == 0 || ${#APT[@]} == 0)) || sudo -n kill "-$1" -- "-$2" 2>/dev/null || true
}

# ---- Python ----

find_python() {
    local name
    for name in "${PYTHON:-python3}" python3 python3.13 python3.12 python3.11 python3.10; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            PYTHON=$name
            return
        fi
    done
    die 3 "no Python 3.10 or newer is here" "install it (apt-get install python3 python3-venv), or set PYTHON=/path/to/python"
}

python_makes_venvs() { "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null; }

venv_works() { [[ -x $VENV/bin/python ]] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; }

# What the environment must have been made from for a second run to need no pip.
stamp() { # stamp EXTRAS
    {
        echo "$ROOT $VENV $1"
        "$VENV/bin/python" -c 'import sys; print(sys.version, sys.base_prefix)'
        cat "$ROOT/pyproject.toml" "$CONSTRAINTS" "$ROOT/bootstrap/build_data.py"
    } | sha256sum | cut -d ' ' -f 1
}

packages_ready() { # packages_ready EXTRAS: what tests need holds all that a rehearsal needs
    local kind
    [[ -x $VENV/bin/python ]] || return 1
    for kind in "$1" dev; do
        if [[ -f $VENV/pctool-$kind.stamp && $(<"$VENV/pctool-$kind.stamp") == "$(stamp "$kind" 2>/dev/null)" ]]; then
            return 0
        fi
    done
    return 1
}

make_venv() { # as plan_venv has decided; the mark comes before pip, so that one whose making was interrupted has it
    local clear=()
    [[ -n $MAKE ]] || return 0
    [[ $MAKE == anew ]] && clear=(--clear)
    if ! { "$PYTHON" -m venv "${clear[@]}" --without-pip "$VENV" && touch "$VENV/$MADE" && "$PYTHON" -m venv "$VENV"; }; then
        die 3 "no virtual environment could be made in $VENV" \
            "check that the folder can be written, or set PCTOOL_VENV to another one"
    fi
}

# ---- torch ----

torch_pin() { sed -n 's/^torch==//p' "$CONSTRAINTS"; }

# Megabytes of the torch that pip finds in folders of this machine (pip's find-links), or nothing. Where the environment
# is yet to be made a scratch one's pip is asked: nothing is changed before the yes.
local_torch_mb() (
    python=$VENV/bin/python
    if [[ -n $MAKE ]]; then
        scratch=$(mktemp -d -t pctool-scratch.XXXXXX)
        trap 'rm -rf -- "$scratch"' EXIT
        "$PYTHON" -m venv "$scratch" >/dev/null 2>&1 || exit 0
        python=$scratch/bin/python
    fi
    report=$("$python" -m pip install --quiet --dry-run --no-deps --no-index --ignore-installed --report - \
        "torch==$(torch_pin)" 2>/dev/null) || exit 0
    "$python" -c '
import json, os, sys, urllib.parse
url = json.load(sys.stdin)["install"][0]["download_info"]["url"]
print(os.path.getsize(urllib.parse.unquote(urllib.parse.urlsplit(url).path)) // 1_000_000)' <<<"$report" 2>/dev/null || exit 0
)

plan_torch() {
    local here
    if [[ -z $MAKE ]] && "$VENV/bin/python" -c "
import importlib.metadata, sys
sys.exit(importlib.metadata.version('torch').split('+')[0] != '$(torch_pin)')" 2>/dev/null; then
        return
    fi
    here=$(local_torch_mb)
    if [[ -n $here ]]; then
        PLAN+=("torch $(torch_pin): $here MB, from a folder of this machine that pip is configured with")
    elif [[ -n $TORCH_INDEX_URL ]]; then
        PLAN+=("torch $(torch_pin): download about $TORCH_CPU_MB MB (its CPU build) from $TORCH_INDEX_URL")
    elif [[ $(uname -m) == x86_64 ]]; then
        PLAN+=("torch $(torch_pin): download about $TORCH_CUDA_MB MB, since pip's default index has the CUDA build"
            "  (for the CPU build, about $TORCH_CPU_MB MB: --torch-index URL or TORCH_INDEX_URL, with the URL that"
            "  PyTorch's 'Start locally' page shows after --index-url when CPU is chosen)")
        ASK=1
    else
        PLAN+=("torch $(torch_pin): download about $TORCH_CPU_MB MB")
    fi
}

install_packages() { # install_packages EXTRAS
    local index=()
    [[ -n $TORCH_INDEX_URL ]] && index=(--index-url "$TORCH_INDEX_URL")
    step "installing torch" "$VENV/bin/python" -m pip install --progress-bar off -c "$CONSTRAINTS" \
        "${index[@]}" "torch==$(torch_pin)"
    step "installing pctool and what it needs" "$VENV/bin/python" -m pip install --progress-bar off \
        -c "$CONSTRAINTS" -e "${ROOT}[$1]"
    stamp "$1" >"$VENV/pctool-$1.stamp"
}

# ---- Slurm and apt ----

slurm_on_path() {
    local name
    for name in "${SLURM_COMMANDS[@]}"; do
        command -v "$name" >/dev/null || return 1
    done
}

# As root, or through sudo where that asks no password.
can_be_root() { ((EUID == 0)) || sudo -n true 2>/dev/null; }

as_root() { if ((EUID == 0)); then "$@"; else sudo -n "$@"; fi; }

have_apt() { command -v apt-get >/dev/null; }

want_apt() { # want_apt WHAT PACKAGES...: what to do where they can't be installed is the caller's business
    local what=$1
    shift
    have_apt && can_be_root || return 1
    APT+=("$@")
    PLAN+=("$what: apt-get install $*")
    ASK=1
}

apt_mb() { # megabytes apt would download; nothing if its lists are not there yet
    apt-get install --print-uris -qq --no-install-recommends "$@" 2>/dev/null |
        awk '$3 ~ /^[0-9]+$/ { bytes += $3 } END { if (bytes) printf "%d", bytes / 1e6 + 1 }'
}

plan_apt_size() {
    local size
    ((${#APT[@]})) || return 0
    size=$(apt_mb "${APT[@]}")
    PLAN+=("apt-get: about ${size:-$SLURM_MB} MB of packages, and about $LISTS_MB MB of package lists")
}

install_apt() {
    ((${#APT[@]})) || return 0
    step "updating apt's lists" as_root apt-get update
    step "downloading ${APT[*]}" as_root apt-get install -y --download-only --no-install-recommends "${APT[@]}"
    step --whole "installing ${APT[*]}" as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends "${APT[@]}"
}

# "22.05" from `slurmctld -V`, which prints "slurm-wlm 22.05.8".
slurm_version() { slurmctld -V 2>/dev/null | grep -oE '[0-9]+\.[0-9]+' | head -n 1; }

slurm_is_new_enough() {
    local found
    found=$(slurm_version)
    [[ $(printf '%s\n' 22.05 "$found" | sort -V | head -n 1) == 22.05 ]]
}

slurm_in_cache() {
    [[ -x $VENV/bin/python ]] &&
        "$VENV/bin/python" -c 'from pctool.slurm.install import find_install; find_install()' >/dev/null 2>&1
}

slurm_ready() {
    if [[ -z ${PCTOOL_SLURM_ROOT:-} ]] && slurm_on_path; then
        slurm_is_new_enough || die 3 "Slurm $(slurm_version) is installed; pctool needs 22.05 or newer" \
            "put a newer Slurm's commands on PATH"
        return
    fi
    slurm_in_cache
}

plan_slurm() {
    slurm_ready && return
    want_apt "Slurm" "${SLURM_PACKAGES[@]}" && return
    have_apt || die 3 "Slurm is not here, and there is no apt-get to install it with" \
        "install Slurm 22.05 or newer and munge, so that these are on PATH: ${SLURM_COMMANDS[*]}"
    PLAN+=("Slurm: apt-get download about $SLURM_MB MB, unpacked into your cache folder (nothing is installed)")
}

install_slurm_unpacked() {
    slurm_ready && return
    step "unpacking Slurm" "$VENV/bin/python" -m pctool.slurm.install
    slurm_ready || die 3 "Slurm is still not here" "ask an administrator for: apt-get install ${SLURM_PACKAGES[*]}"
}

# ---- the whole ----

# Decide whether the environment has to be made, and do nothing to it. Fails where apt has to bring Python's venv
# module first.
plan_venv() { # plan_venv EXTRAS
    local package
    MAKE=
    { packages_ready "$1" || venv_works; } && return
    if [[ -z $(ls -A "$VENV" 2>/dev/null) ]]; then
        MAKE=new
    elif [[ -f $VENV/$MADE ]]; then # Python was replaced, or the making of it was interrupted
        MAKE=anew ASK=1
        PLAN+=("the environment there no longer works: it is emptied and made anew")
    elif [[ -f $VENV/pyvenv.cfg ]]; then
        die 2 "$VENV is a virtual environment that does not work, and was not made here; nothing was changed" \
            "set PCTOOL_VENV to another folder, or remove $VENV (it needs Python and pip; uv makes them with --seed)"
    else
        die 2 "$VENV is there and is no virtual environment" "set PCTOOL_VENV to another folder"
    fi
    python_makes_venvs && return
    package=$("$PYTHON" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    want_apt "Python's venv module" "$package" || die 3 "$PYTHON cannot make a virtual environment (no ensurepip)" \
        "ask an administrator for: apt-get install $package"
    return 1
}

plan_packages() { # plan_packages EXTRAS
    packages_ready "$1" && return
    plan_torch
    if [[ $1 == dev ]]; then
        PLAN+=("pctool's requirements and the tests' tools: download about $DEV_MB MB")
    else
        PLAN+=("pctool's requirements: download about $RUN_MB MB")
    fi
}

show_plan_and_ask() { # show_plan_and_ask WHAT-A-NO-MEANS
    ((${#PLAN[@]})) || return 0
    say "To be set up, in $VENV unless it says apt:"
    printf '  %s\n' "${PLAN[@]}" >&2
    [[ -n $ASK && -z $YES ]] || return 0
    [[ -t 0 ]] || die 2 "this needs a yes, and standard input is no terminal" "say --yes, or set CI=true"
    local answer
    read -r -p "Go on? [y/N] " answer
    [[ $answer == [yY]* ]] || die 2 "$1"
}

# shellcheck disable=SC2034 # TAKEN is read by the two scripts
common_option() { # common_option ARGUMENTS...: sets TAKEN to how many of them it used, 0 if the first is not one of ours
    TAKEN=0
    case $1 in
    --yes | -y) YES=1 TAKEN=1 ;;
    --torch-index)
        [[ -n ${2:-} ]] || die 2 "--torch-index needs a URL"
        TORCH_INDEX_URL=$2 TAKEN=2
        ;;
    --torch-index=*) TORCH_INDEX_URL=${1#*=} TAKEN=1 ;;
    esac
}

# Set up once: the second call finds everything and starts neither pip nor apt.
prepare() { # prepare EXTRAS (all | dev)
    local planned=
    [[ -f $ROOT/pyproject.toml ]] || die 2 "$ROOT is no checkout of pctool" "run this from a git clone"
    export PATH=$PATH:/usr/sbin:/sbin # where Debian keeps daemons, and ordinary users do not look
    exec 9<"$ROOT"
    flock 9 # two runs at once would both fill one environment
    if ! { packages_ready "$1" && slurm_ready; }; then
        LOG=$(mktemp -t pctool-setup.XXXXXX)
        find_python
        plan_slurm
        if plan_venv "$1"; then
            planned=1
            plan_packages "$1"
        else
            PLAN+=("then torch and Python packages, of which you are told before they are downloaded")
        fi
        plan_apt_size
        show_plan_and_ask "nothing was changed"
        install_apt
        if [[ -z $planned ]]; then
            PLAN=() ASK=
            python_makes_venvs || die 3 "$PYTHON still cannot make a virtual environment"
            plan_venv "$1"
            plan_packages "$1"
            show_plan_and_ask "nothing more was changed"
        fi
        make_venv
        packages_ready "$1" || install_packages "$1"
        install_slurm_unpacked
        rm -f "$LOG"
    fi
    exec 9<&-
    export PATH=$VENV/bin:$PATH
}
