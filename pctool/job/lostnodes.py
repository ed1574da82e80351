"""Leave a lost node to Slurm first, where a requeue before that would end badly.

Seen on 22.05.8, not on 24.11.5 nor 26.05.5 (the releases between were not tried): a job is requeued, by exit code or by
scontrol, while one of its nodes is dead, and slurmctld then sets that node DOWN by itself. The job is not cleaned up
whole. It starts once more with the GPUs of its nodes forgotten (`srun: Invalid generic resource`), and those GPUs count
as used for ever after. Where the job still runs when slurmctld gives the node up, it is requeued as NODE_FAIL and all
is well. The wait costs nothing: until then the job cannot start again anyway.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterable, Mapping

from pctool.errors import SlurmError
from pctool.job.hold import tell
from pctool.slurm import query

SOUND_SINCE = (24, 11)
PERIOD_S = 2.0  # one scontrol call and one connection a lost node
CONNECT_S = 3.0
SLACK_S = 60.0  # beyond SlurmdTimeout: slurmctld's rounds of pings, and their own time-outs


def await_loss(nodes: Iterable[str]) -> None:
    """Wait until Slurm has given up those of the nodes whose slurmd does not answer; that ends this process' job.

    Returns at once where they all answer or where the release is sound; in any case after SlurmdTimeout and a minute.
    Where slurmctld does not say where a node is, that node counts as silent. Where it does not say its settings for
    two minutes, there is no wait.
    """
    names = sorted(nodes)
    try:
        if not names or query.slurm_version() >= SOUND_SINCE:
            return
        settings = query.patiently(query.config)
        timeout = _number(settings.get("SlurmdTimeout", ""))
        silent = [name for name in names if not _answers(name, settings)] if timeout else []
        if silent:
            tell(f"pctool decide: waiting for Slurm to give up {', '.join(silent)}")
            _wait(silent, settings, timeout + SLACK_S)
    except SlurmError as error:
        tell(f"pctool decide: not waiting for Slurm: {error}")


def answers(name: str, settings: Mapping[str, str]) -> bool:
    """Return whether the node's slurmd takes a connection where Slurm itself would look for it."""
    node = query.show_node(name)
    if node is None:
        return False
    port = _number(node.fields.get("Port", "")) or _number(settings.get("SlurmdPort", ""))
    try:
        with socket.create_connection((node.addr, int(port)), CONNECT_S):
            return True
    except OSError:
        return False


def _wait(names: list[str], settings: Mapping[str, str], seconds: float) -> None:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        time.sleep(PERIOD_S)
        if all(_answers(name, settings) for name in names):
            return  # a slurmd that was only restarted


def _answers(name: str, settings: Mapping[str, str]) -> bool:
    """Return what `answers` does; a slurmctld that is away for a while must not end the wait."""
    try:
        return answers(name, settings)
    except SlurmError:
        return False


def _number(text: str) -> float:
    match = re.match(r"\d+", text)
    return float(match[0]) if match else 0.0
