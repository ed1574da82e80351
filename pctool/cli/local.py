"""`pctool local`: start, look at, disturb and end a private Slurm on this machine."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pctool.errors import SlurmError

if TYPE_CHECKING:
    from pctool.slurm.private import PrivateCluster

EXAMPLES = """example:
  pctool local up --cluster cluster.yaml
  pctool local shell                         # sinfo, sbatch, srun speak to it
  pctool local notice p5spot-dy-p5-2         # in two minutes that node is gone
  pctool local down"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their options."""
    parser.epilog = EXAMPLES
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _configure_up(_action(actions, "up", "start a cluster that mirrors a cluster config, and leave it running"))
    status = _action(actions, "status", "show the cluster and its nodes")
    status.add_argument("--json", action="store_true", help="print JSON")
    down = _action(actions, "down", "end the cluster; nothing of it is left")
    down.add_argument("--all", action="store_true", help="end every cluster of yours")
    shell = _action(actions, "shell", "open $SHELL, or run a command, with Slurm's commands speaking to the cluster")
    shell.add_argument("command", nargs="*", metavar="COMMAND", help="default: $SHELL")
    notice = _action(actions, "notice", "give a node a spot interruption notice; it dies at the deadline")
    notice.add_argument("node", metavar="NODE", help="its name, as sinfo shows it")
    notice.add_argument("--lead", type=float, default=120.0, metavar="SECONDS", help="until it dies (default 120)")
    kill = _action(actions, "kill", "lose a node now, without a notice")
    kill.add_argument("node", metavar="NODE", help="its name, as sinfo shows it")
    kill.add_argument("--never-down", action="store_true", help="leave it to Slurm alone to notice (SlurmdTimeout)")


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
    parser.add_argument("--name", default="default", help="which cluster, where you have several (default: default)")
    return parser


def _configure_up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", required=True, type=Path, metavar="FILE", help="a ParallelCluster 3 config")
    parser.add_argument("-N", "--nodes", type=int, metavar="N", help="at most N nodes a queue (default: as configured)")
    parser.add_argument("--time-scale", type=float, default=1.0, metavar="X", help="multiply all of Slurm's times by X")
    parser.add_argument("--boot-delay", type=float, default=0.0, metavar="SECONDS", help="how long an instance boots")
    parser.add_argument("--powered-down", action="store_true", help="dynamic nodes boot only when a job wants them")
    parser.add_argument(
        "--slurm-root", type=Path, metavar="DIR", help="run the Slurm unpacked in DIR instead of the machine's"
    )


def run(args: argparse.Namespace) -> int:
    """Do one action and return its exit code."""
    from pctool.slurm.private import registry

    if args.action == "up":
        return _up(args)
    if args.action == "down":
        return _down(registry.names() if args.all else [args.name])
    cluster = registry.find(args.name)
    if args.action == "status":
        _print_status(cluster, as_json=args.json)
    elif args.action == "shell":
        return _shell(cluster, args)
    elif args.action == "notice":
        deadline = cluster.notice(args.node, lead_s=args.lead)
        print(f"{args.node} dies at {time.strftime('%H:%M:%S', time.localtime(deadline))}")
    else:
        cluster.kill(args.node, down_after=None if args.never_down else "clustermgtd")
    return 0


def _up(args: argparse.Namespace) -> int:
    from pctool.cluster.view import load_view
    from pctool.slurm.install import find_install
    from pctool.slurm.private import PrivateCluster, registry

    view = load_view(args.cluster)
    with registry.claim(args.name) as entry:
        cluster = PrivateCluster.start(
            view,
            nodes=args.nodes,
            time_scale=args.time_scale,
            boot_delay=args.boot_delay,
            booted=not args.powered_down,
            install=find_install(args.slurm_root),
            owner=None,
        )
        registry.record(entry, cluster)
    for key, why in cluster.not_mirrored.items():
        print(f"not mirrored: {key}: {why}", file=sys.stderr)
    name = "" if args.name == "default" else f" --name {args.name}"
    print(f"# Slurm {cluster.slurm_version}, {len(cluster.node_names)} nodes, in {cluster.folder}", file=sys.stderr)
    print(
        f"# to use it: the lines below, or `pctool local shell{name}`; to end it: `pctool local down{name}`",
        file=sys.stderr,
    )
    print("\n".join(_exports(cluster)))
    return 0


def _exports(cluster: PrivateCluster) -> list[str]:
    return [f"export {key}={shlex.quote(value)}" for key, value in cluster.env.items() if os.environ.get(key) != value]


def _down(which: list[str]) -> int:
    from pctool.slurm.private import registry

    for name in which:
        if registry.forget_killed_start(name):
            print(f"forgot {name}, whose start was killed", file=sys.stderr)
            continue
        registry.find(name).down()
        registry.forget(name)
        print(f"ended {name}", file=sys.stderr)
    return 0


def _print_status(cluster: PrivateCluster, *, as_json: bool) -> None:
    status = cluster.status()
    if as_json:
        print(json.dumps(status, indent=2))
        return
    print(f"Slurm {status['slurm_version']} in {status['folder']}, time scale {status['time_scale']:g}")
    print(
        "\n".join(["to use it here:", *(f"  {line}" for line in _exports(cluster))]) if _exports(cluster) else "in use"
    )
    rows = [("NODE", "INSTANCE", "STATE", "SLURM", "DIES AT")]
    for name, node in status["nodes"].items():
        dies = time.strftime("%H:%M:%S", time.localtime(node["deadline"])) if node["deadline"] else "-"
        rows.append((name, node["instance_id"] or "-", node["state"], node["slurm"] or "-", dies))
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip())


def _shell(cluster: PrivateCluster, args: argparse.Namespace) -> int:
    command = args.command or [os.environ.get("SHELL") or "/bin/sh"]
    env = {**os.environ, **cluster.env, "PCTOOL_LOCAL": args.name}
    try:
        return subprocess.run(command, env=env, check=False).returncode
    except OSError as error:
        raise SlurmError(f"{command[0]} cannot be started: {error.strerror}") from None
