#!/usr/bin/env bash
# Set up what a rehearsal needs, then rehearse the shipped example: four simulated p5.48xlarge nodes, one of which gets
# a spot notice and dies. The second run goes straight to the rehearsal.
#
#   bootstrap/try.sh [--yes] [--torch-index URL] [-- options of pctool rehearse]
#
# PYTHON, PCTOOL_VENV and TORCH_INDEX_URL choose the interpreter, the environment's folder and torch's index.

# shellcheck source=bootstrap/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

while (($#)); do
    case $1 in
    -h | --help) usage && exit 0 ;;
    --) shift && break ;;
    *)
        common_option "$@"
        ((TAKEN)) || die 2 "unknown argument '$1'" "options of pctool rehearse go after --"
        shift "$TAKEN"
        ;;
    esac
done

prepare all
cd "$ROOT"
exec python -m pctool rehearse docs/examples/tinygpt/job.toml --cluster cluster-configs/p5-spot.yaml --scenario notice "$@"
