"""Leave a lost node to Slurm first, where a requeue before that would end badly.

Seen on 22.05.8, not on 24.11.5 nor 26.05.5 (the releases between were not tried): a job is requeued, by exit code or by
scontrol, while one of its nodes is dead, and slurmctld then sets that node DOWN by itself. The job is not cleaned up
whole. It starts once more with the GPUs of its nodes forgotten (`srun: Invalid generic resource`), and those GPUs count
as used for ever after. Where the job still runs when slurmctld gives the node up, it is requeued as NODE_FAIL and all
is well. The wait costs nothing: until then the job cannot start again anyway.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from pctool.errors import SlurmError
from pctool.job.hold import tell
from pctool.slurm import query

SOUND_SINCE = (24, 11)
PERIOD_S = 2.0  # one scontrol call a node; Slurm itself looks every SlurmdTimeout / 3
PING_SHARE = 3  # slurmctld pings its nodes every SlurmdTimeout / 3
SLACK_S = 30.0  # for a ping's own time-out


def await_loss(nodes: Iterable[str]) -> None:
    """Wait until Slurm has found these nodes dead, which ends this process with its job; return if they seem alive.

    Waits at most SlurmdTimeout and a minute, and not at all where the release is sound or Slurm cannot be asked.
    """
    names = sorted(nodes)
    try:
        if not names or query.slurm_version() >= SOUND_SINCE:
            return
        timeout = _seconds(query.config().get("SlurmdTimeout", ""))
        if timeout:
            tell(f"pctool decide: waiting for Slurm to give up {', '.join(names)}")
            _wait(names, timeout)
    except SlurmError as error:
        tell(f"pctool decide: not waiting for Slurm: {error}")


def _wait(names: list[str], timeout: float) -> None:
    began = time.monotonic()
    while (waited := time.monotonic() - began) < timeout + 2 * SLACK_S:
        suspect = any(_suspect(name) for name in names)
        if not suspect and waited > timeout / PING_SHARE + SLACK_S:
            return
        time.sleep(PERIOD_S)


def _suspect(name: str) -> bool:
    node = query.show_node(name)
    return node is not None and bool(node.states & {"NOT_RESPONDING", "DOWN"})


def _seconds(text: str) -> float:
    match = re.match(r"\d+", text)
    return float(match[0]) if match else 0.0
