#!/usr/bin/env bash
# Set up what the tests need, then lint and test. Ends with the seconds of each stage; exit code 1 if any failed.
#
#   bootstrap/test.sh [--yes] [--torch-index URL] [--scope all|lint|quick|tests] [--] [options of pytest]
#
# Scopes: `lint` runs no tests; `quick` leaves out the tests that start Slurm or torch; `tests` runs only pytest.
# PCTOOL_TEST_SCOPE sets the scope too. Arguments that are not ours are passed on to pytest.

# shellcheck source=bootstrap/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

SCOPE=${PCTOOL_TEST_SCOPE:-all}
PYTEST=()
while (($#)); do
    case $1 in
    -h | --help) usage && exit 0 ;;
    --scope) SCOPE=${2:?--scope needs a name} && shift 2 ;;
    --scope=*) SCOPE=${1#*=} && shift ;;
    --) shift && PYTEST+=("$@") && break ;;
    *)
        common_option "$@"
        ((TAKEN)) || { PYTEST+=("$1") && TAKEN=1; }
        shift "$TAKEN"
        ;;
    esac
done
[[ $SCOPE =~ ^(all|lint|quick|tests)$ ]] || die 2 "unknown scope '$SCOPE'" "choose all, lint, quick or tests"

SUMMARY=()
FAILED=0

stage() { # stage NAME COMMAND...: go on after a failure, so that one run tells all
    local name=$1 began=$SECONDS code=0
    shift
    printf '\n== %s\n' "$name"
    "$@" || code=$?
    ((code)) && FAILED=1
    SUMMARY+=("$(printf '%-34s %6d s  %s' "$name" $((SECONDS - began)) "$( ((code)) && echo "failed ($code)" || echo ok)")")
}

# shellcheck disable=SC2317,SC2329 # called through stage
typecheck() {
    local file code=0
    mypy || code=1
    for file in tests/*/conftest.py; do # all of one name, so mypy takes one at a time
        mypy "$file" || code=1
    done
    return "$code"
}

lint() {
    stage "ruff check" ruff check .
    stage "ruff format" ruff format --check .
    stage "mypy" typecheck
    stage "import-linter" lint-imports
    stage "shellcheck" shellcheck -x bootstrap/*.sh .ci/run
}

tests() {
    local slow=(--durations=15 --durations-min=5)
    if ((${#PYTEST[@]})); then
        stage "pytest ${PYTEST[*]}" pytest "${PYTEST[@]}"
        return
    fi
    stage "pytest, without Slurm and torch" pytest -m "not slurm and not torch" "${slow[@]}"
    [[ $SCOPE == quick ]] && return
    # rehearsals mostly wait for Slurm, so they run beside the rest; two at a time are what two cores bear
    local log began=$SECONDS
    log=$(mktemp)
    set -m # a process group of its own, which Ctrl-C can be passed on to
    pytest tests/rehearsal "${slow[@]}" >"$log" 2>&1 </dev/null &
    REHEARSALS=$!
    set +m
    trap 'kill -INT -- "-$REHEARSALS" 2>/dev/null; wait "$REHEARSALS"; exit 130' INT TERM
    stage "pytest, with Slurm or torch" pytest -m "slurm or torch" --ignore=tests/rehearsal "${slow[@]}"
    stage "pytest, rehearsals (beside it)" wait_for_rehearsals "$log"
    SUMMARY+=("$(printf '%-34s %6d s' "  both together" $((SECONDS - began)))")
}

# shellcheck disable=SC2317,SC2329 # called through stage
wait_for_rehearsals() { # wait_for_rehearsals LOG
    local code=0
    wait "$REHEARSALS" || code=$?
    trap - INT TERM
    cat "$1"
    rm -f "$1"
    return "$code"
}

prepare dev
cd "$ROOT"
unset PYTHONUNBUFFERED # users do not have it, and it hides what an interpreter cannot write at its end
[[ $SCOPE == tests ]] || lint
[[ $SCOPE == lint ]] || tests
printf '\n== summary\n'
printf '%s\n' "${SUMMARY[@]}"
exit "$FAILED"
