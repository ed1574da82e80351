"""`pctool rehearse`: arguments, progress, the verdict table."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pctool.errors import UsageError

if TYPE_CHECKING:
    from pctool.rehearsal.verdict import Verdict
    from pctool.spec.job import JobSpec

SMALLEST_SCALE = 0.06  # below, SlurmdTimeout and the notice would be shorter than times that do not scale
COLUMNS = (
    ("scenario", "scenario"),
    ("verdict", "passed"),
    ("steps lost", "steps_lost"),
    ("notice to durable", "notice_to_durable_s"),
    ("end to restart", "end_to_restart_s"),
    ("restart to 1st step", "restart_to_first_step_s"),
    ("losses", "losses_equal"),
    ("samples", "samples_equal"),
    ("weights", "weights_equal"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("job", metavar="JOB", help="the job spec (TOML)")
    parser.add_argument("--cluster", metavar="CONFIG", required=True, help="the ParallelCluster config to mirror")
    parser.add_argument(
        "--scenario",
        metavar="NAME",
        action="append",
        default=[],
        help="only this one (repeat for several; default: all)",
    )
    parser.add_argument("-N", "--nodes", type=int, help="nodes of the job (default: the spec's)")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="ranks a node (default: 1)")
    parser.add_argument("-p", "--partition", help="partition (default: the spec's)")
    parser.add_argument(
        "--time-scale",
        type=float,
        default=0.25,
        metavar="X",
        help="multiply all times of the cluster together: notice, SlurmdTimeout, KillWait, --wait ... (default: 0.25)",
    )
    parser.add_argument("--boot-delay", type=float, default=0.0, metavar="S", help="seconds a new node needs (scaled)")
    parser.add_argument(
        "--spare-nodes",
        type=int,
        default=0,
        metavar="N",
        help="nodes beyond the job's; with none the job waits until a lost node is replaced (default: 0)",
    )
    parser.add_argument("--rounds", type=int, default=1, help="run the scenarios this many times (default: 1)")
    parser.add_argument("--baseline", metavar="DIR", help="reuse FOLDER/baseline of an earlier rehearsal of this job")
    parser.add_argument("--folder", metavar="DIR", help="keep everything here (default: kept only if a verdict fails)")
    parser.add_argument("--slurm-root", metavar="DIR", help="use the Slurm unpacked under this root")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")


def run(args: argparse.Namespace) -> int:
    """Rehearse and print the verdicts; 0 if all passed, 1 if any failed."""
    from pctool.cluster.view import load_view
    from pctool.job.check import check_cluster
    from pctool.job.load import load_job
    from pctool.rehearsal.rehearse import Rehearsal, rehearse
    from pctool.rehearsal.scenarios import choose
    from pctool.slurm.install import find_install

    if not SMALLEST_SCALE <= args.time_scale <= 1.0:
        raise UsageError(
            f"--time-scale {args.time_scale:g} is outside of {SMALLEST_SCALE} to 1",
            fix="use 0.25, or 1 for real times",
        )
    if args.rounds < 1:
        raise UsageError(f"--rounds {args.rounds} rehearses nothing", fix="use 1 or more")
    spec = _override(load_job(Path(args.job)), args)
    scenarios = choose(args.scenario, nodes=spec.nodes)
    view = load_view(Path(args.cluster))
    check_cluster(spec, view)
    install = find_install(Path(args.slurm_root)) if args.slurm_root else find_install()
    folder = _folder(args.folder, spec.name)
    rehearsal = Rehearsal(
        spec=spec,
        view=view,
        folder=folder,
        scale=args.time_scale,
        boot_delay=args.boot_delay,
        spare_nodes=args.spare_nodes,
        install=install,
        say=lambda line: print(f"rehearse: {line}", file=sys.stderr, flush=True),
    )
    earlier = Path(args.baseline).absolute() if args.baseline else None
    verdicts: list[Verdict] = []
    try:
        for verdict in rehearse(rehearsal, scenarios, rounds=args.rounds, earlier=earlier):
            verdicts.append(verdict)
            said = "passed" if verdict.passed else f"FAILED: {verdict.why}"
            print(f"rehearse: {verdict.scenario}: {said}", file=sys.stderr, flush=True)
    finally:  # what was seen before Ctrl-C is worth showing
        if verdicts:
            _print(verdicts, as_json=args.json)
    passed = all(verdict.passed for verdict in verdicts)
    if passed and not args.folder:
        shutil.rmtree(folder)
    else:
        print(f"rehearse: everything is kept in {folder}", file=sys.stderr)
    return 0 if passed else 1


def _override(spec: JobSpec, args: argparse.Namespace) -> JobSpec:
    return replace(
        spec,
        nodes=args.nodes or spec.nodes,
        ranks_per_node=args.ranks_per_node,
        partition=args.partition or spec.partition,
    )


def _folder(given: str | None, name: str) -> Path:
    if given is None:
        return Path(tempfile.mkdtemp(prefix=f"pctool-rehearsal-{name}-"))
    folder = Path(given).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the folder: {error.strerror}", where=given, fix="name another --folder"
        ) from None
    if any(folder.iterdir()) or not os.access(folder, os.W_OK):
        raise UsageError("the folder is not empty or not writable", where=given, fix="name a new --folder")
    return folder


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "equal" if value else "DIFFER"
    return f"{value:.1f} s" if isinstance(value, float) else str(value)


def _print(verdicts: Sequence[Verdict], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"verdicts": [verdict.as_json() for verdict in verdicts]}, indent=2))
    else:
        _print_table(verdicts)


def _print_table(verdicts: Sequence[Verdict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Rehearsal")
    for title, _ in COLUMNS:
        table.add_column(title, overflow="fold")
    for verdict in verdicts:
        record = verdict.as_json()
        cells = [_cell(record[key]) for _, key in COLUMNS]
        cells[1] = "[green]passed[/green]" if verdict.passed else "[red]FAILED[/red]"
        table.add_row(*cells)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for verdict in verdicts:
        if not verdict.passed:
            console.print(f"{verdict.scenario}: {verdict.why}", markup=False)
