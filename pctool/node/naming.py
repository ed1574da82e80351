"""Find out what Slurm calls this node, and drain it. Root's watcher runs outside of any job."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from datetime import datetime, timezone

from pctool.aws.imds import Notice
from pctool.errors import SlurmError, UsageError
from pctool.slurm.command import run

_TIMEOUT_S = 10.0  # shorter than Slurm's usual 30 s: the watcher should go on looking
_NODE_LINE = re.compile(r"^NodeName=(\S+).*?\bNodeHostName=(\S+)", re.MULTILINE)


def node_name(environ: Mapping[str, str]) -> str:
    """Return SLURMD_NODENAME if set (in a job), else the node that Slurm knows on this host.

    Where Slurm does not answer, the short host name is returned: on ParallelCluster that is the node's name.
    Raises UsageError where several nodes share this host, as on a private Slurm.
    """
    if environ.get("SLURMD_NODENAME"):
        return environ["SLURMD_NODENAME"]
    host = socket.gethostname().split(".")[0]
    try:
        listing = run(["scontrol", "--oneliner", "show", "nodes"], timeout=_TIMEOUT_S).stdout
    except SlurmError:
        return host
    names = names_on_host(listing, host)
    if len(names) > 1:
        raise UsageError(f"host {host} is {len(names)} nodes: {', '.join(names[:4])} ...", fix="name one with --node")
    return names[0] if names else host


def names_on_host(listing: str, host: str) -> list[str]:
    """Return the nodes on `host` by the text of `scontrol --oneliner show nodes`."""
    return [name for name, where in _NODE_LINE.findall(listing) if host in {name, where, where.split(".")[0]}]


def drain(node: str, notice: Notice) -> str | None:
    """Ask Slurm to give the node no new job; return what went wrong, or None. Needs an administrator of Slurm."""
    when = datetime.fromtimestamp(notice.time, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ") if notice.time else "soon"
    reason = f"pctool: spot notice, {notice.action} at {when}"
    try:
        run(["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"], timeout=_TIMEOUT_S)
    except SlurmError as error:
        return str(error)
    return None
