"""munged and slurmctld of one private cluster, its files, and the Slurm commands its supervisor runs."""

from __future__ import annotations

import os
import pwd
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pctool.errors import SlurmError
from pctool.slurm import command
from pctool.slurm.private import conf, proc
from pctool.slurm.private.config import ClusterConfig
from pctool.slurm.private.ports import Ports
from pctool.slurm.private.tools import prepare

_START_S = 60.0  # slurmctld and four slurmd are up in 0.1 s on an idle machine; this is for a loaded one
_POLL_S = 0.05  # while the cluster starts: its daemons tell nobody when they are ready
_ANSWER_S = 20.0  # for a Slurm command of the supervisor
_UP = ("IDLE", "ALLOCATED", "MIXED")


class Daemons:
    """The daemons of one cluster. Start order: write_files, start_controller; nodes are started by the fleet."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.tools = prepare(config.install, config.folder)
        self.ports = Ports()
        view_nodes = sum(queue.max_nodes for queue in config.view.queues)
        self.layout = conf.Layout(
            folder=config.folder,
            host=socket.gethostname().partition(".")[0],
            user=pwd.getpwuid(os.getuid()).pw_name,
            ports=self.ports.take(1 + view_nodes),
            version=config.install.version,
            time_scale=config.time_scale,
            plugin_dir=self.tools.plugin_dir,
            path_prefix=self.tools.path_prefix,
            extra=config.settings,
        )
        self.not_mirrored: dict[str, str] = {}
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def env(self) -> dict[str, str]:
        """Return the whole environment of the daemons: nothing of the caller's reaches a node."""
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        prefix = self.tools.path_prefix
        return {"PATH": f"{prefix}:{path}" if prefix else path, "SLURM_CONF": str(self.layout.conf), "LANG": "C.UTF-8"}

    def pids(self) -> set[int]:
        """Return the pids of munged and slurmctld."""
        return {daemon.pid for daemon in self._started.values()}

    def facts(self) -> dict[str, Any]:
        """Return what a client has to know to use the cluster."""
        return {
            "folder": str(self.config.folder),
            "conf": str(self.layout.conf),
            "path_prefix": self.tools.path_prefix,
            "nodes": [name for queue in self.config.view.queues for name in _names(queue)],
            "slurm_version": self.config.install.release,
            "time_scale": self.config.time_scale,
            "not_mirrored": self.not_mirrored,
            "pid": os.getpid(),
        }

    def write_files(self) -> None:
        """Write the cluster's folder: Slurm's files, the programs it calls, a munge key of its own."""
        folder, layout = self.config.folder, self.layout
        text, self.not_mirrored = conf.slurm_conf(self.config.view, layout)
        for name in ("etc", "bin", "nodes", "dev", "munge", "state", "spool", "run", "log"):
            (folder / name).mkdir(mode=0o755, exist_ok=True)
        (folder / "log").chmod(0o700)
        (folder / "state").chmod(0o700)
        files = {"slurm.conf": text, "gres.conf": conf.gres_conf(self.config.view, layout)}
        if layout.version >= conf.CGROUP_PLUGIN_SINCE:
            files["cgroup.conf"] = conf.CGROUP_CONF
        for name, content in files.items():
            (folder / "etc" / name).write_text(content)
        for name, program in conf.programs(layout, self.tools.slurmstepd).items():
            (folder / "bin" / name).write_bytes(program)
            (folder / "bin" / name).chmod(0o755)
        gpus = max((cr.gpus for queue in self.config.view.queues for cr in queue.compute_resources), default=0)
        for number in range(gpus):
            (folder / "dev" / f"nvidia{number}").touch()
        key = folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))

    def start_controller(self) -> None:
        """Start munged and slurmctld and wait until both answer."""
        munge = self.config.folder / "munge"
        words = {"socket": self.layout.munge_socket, "key-file": munge / "key", "pid-file": munge / "pid"}
        words |= {"log-file": self.config.folder / "log" / "munged.log", "seed-file": munge / "seed"}
        options = [f"--{name}={value}" for name, value in words.items()]
        self._start("munged", [self.tools.munged, "--foreground", "--force", "--num-threads=2", *options])
        self._wait("munged", self.layout.munge_socket.exists)
        self._start("slurmctld", [self.tools.slurmctld, "-D", "-f", str(self.layout.conf)])
        self._wait("slurmctld", self._controller_answers)

    def slurmd(self, node: str, *, powered_up: bool) -> list[str]:
        """Return the argv of a node's slurmd, which stays in the foreground.

        With `powered_up` it says that the machine has booted just now, which Slurm waits for after a power-up; by this
        machine's uptime it would wait in vain. Without one it would set the node DOWN, "unexpectedly rebooted".
        """
        spool = self.config.folder / "spool" / node
        spool.mkdir(mode=0o755, exist_ok=True)  # 23.11 and newer do not make it themselves
        stepd = f"{self.config.folder}/bin/slurmstepd"
        booted = ["-b"] if powered_up else []
        return [self.tools.slurmd, "-D", *booted, "-N", node, "-f", str(self.layout.conf), "-d", stepd]

    def printed(self, name: str) -> Path:
        """Return the path of what a daemon or a node's slurmd prints, in addition to its log."""
        return self.config.folder / "log" / f"{name}.out"

    def wait_for_nodes(self, names: Sequence[str], poll: Callable[[float], None]) -> None:
        """Wait until Slurm shows these nodes as usable; `poll` serves other events meanwhile."""
        end = time.monotonic() + _START_S
        while True:
            states = self.states()
            late = [name for name in names if not _usable(states.get(name, ""))]
            if not late:
                return
            if time.monotonic() > end:
                raise SlurmError(
                    f"{len(late)} nodes did not come up in {_START_S:g} s, {late[0]} is {states.get(late[0])!r}; "
                    f"its slurmd said: {self.tail(late[0])}"
                )
            self._check_alive("slurmctld")
            poll(_POLL_S)

    def states(self) -> dict[str, str]:
        """Return each node's state with all its flags, as `scontrol show node` writes it: IDLE+CLOUD+POWERED_DOWN."""
        text = self.slurm("scontrol", "show", "node", "-o").stdout
        rows = (dict(word.partition("=")[::2] for word in line.split()) for line in text.splitlines())
        return {row["NodeName"]: row["State"] for row in rows if "NodeName" in row}

    def update_node(self, nodes: str, state: str, reason: str | None = None) -> None:
        """Run `scontrol update NodeName=... State=...`; a reason is needed for DOWN."""
        words = [f"NodeName={nodes}", f"State={state}", *([f"Reason={reason}"] if reason else [])]
        self.slurm("scontrol", "update", *words)

    def expand(self, nodes: str) -> list[str]:
        """Return the names of a node list, by Slurm's own parser."""
        return self.slurm("scontrol", "show", "hostnames", nodes).stdout.split()

    def slurm(self, name: str, *arguments: str) -> command.Completed:
        """Run one of Slurm's commands against this cluster; raise SlurmError if it fails."""
        return command.run([f"{self.tools.bin_dir}/{name}", *arguments], timeout=_ANSWER_S, env=self.env)

    def _start(self, name: str, argv: list[str]) -> None:
        with self.printed(name).open("wb") as out:
            self._started[name] = subprocess.Popen(
                argv, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def _wait(self, name: str, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + _START_S
        while not ready():
            self._check_alive(name)
            if time.monotonic() > end:
                raise SlurmError(f"{name} gave no answer in {_START_S:g} s and said: {self.tail(name)}")
            time.sleep(_POLL_S)

    def _check_alive(self, name: str) -> None:
        code = self._started[name].poll()
        if code is not None:
            raise SlurmError(f"{name} ended with {code} and said: {self.tail(name)}")

    def _controller_answers(self) -> bool:
        argv = [f"{self.tools.bin_dir}/scontrol", "ping"]
        return "is UP" in command.run(argv, timeout=_ANSWER_S, env=self.env, check=False).stdout

    def tail(self, name: str) -> str:
        """Return the last lines that a daemon printed or logged."""
        text = _read(self.printed(name)) or _read(self.config.folder / "log" / f"{name}.log")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-3:]) or "nothing"


def _names(queue: Any) -> list[str]:
    return [name for cr in queue.compute_resources for name, _ in cr.node_names()]


def _usable(state: str) -> bool:
    base, *flags = state.split("+")
    return base in _UP and not {"POWERED_DOWN", "POWERING_UP", "POWERING_DOWN", "NOT_RESPONDING"} & set(flags)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def is_down(state: str) -> bool:
    """Tell whether a state is DOWN or fully drained, and power saving is not at work on the node."""
    base, *flags = state.rstrip("*").split("+")
    busy = {"POWERING_DOWN", "POWERED_DOWN", "POWERING_UP", "POWER_DOWN", "POWER_UP"} & set(flags)
    drained = base == "IDLE" and "DRAIN" in flags and "COMPLETING" not in flags
    return not busy and (base.rstrip("*") == "DOWN" or drained)


def is_given_up(state: str) -> bool:
    """Tell whether slurmctld gave a node up that did not boot within ResumeTimeout."""
    base, *flags = state.split("+")
    return base.rstrip("*") == "DOWN" and "POWERED_DOWN" in flags


def processes_of(root: int, job: str | None) -> list[int]:
    """Return the pids below a node's init, of one job only where `job` is given (by SLURM_JOB_ID)."""
    below = proc.descendants(root, proc.snapshot())
    return sorted(pid for pid in below if job is None or proc.environment(pid).get("SLURM_JOB_ID") == job)
