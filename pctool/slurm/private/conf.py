"""The files of a private cluster as text: slurm.conf, gres.conf, cgroup.conf, the programs Slurm calls. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pctool.slurm.private import settings as rules
from pctool.slurm.private import subreaper
from pctool.slurm.private.nodes import gres_lines, node_line, node_ranges, partition_lines, static_nodes
from pctool.slurm.private.settings import Settings
from pctool.spec.cluster import ClusterView, QueueView

FILE_NAME = "slurm.conf"
CGROUP_PLUGIN_SINCE = (23, 11)  # from then on slurmd fails without a cgroup plugin, also where nothing uses cgroups
CGROUP_CONF = "CgroupPlugin=disabled\n"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What the files of one cluster depend on besides the view."""

    folder: Path
    host: str  # this machine's short name
    user: str  # whom the daemons run as
    ports: Sequence[int]  # the controller's, then one a node in the order of the view
    version: tuple[int, int]
    time_scale: float = 1.0
    plugin_dir: str | None = None
    path_prefix: str | None = None  # folder of Slurm's commands where they are not on everybody's PATH
    extra: Mapping[str, str] = field(default_factory=dict)  # settings that win over all others, not scaled

    @property
    def conf(self) -> Path:
        """Return the path of slurm.conf."""
        return self.folder / "etc" / FILE_NAME

    @property
    def munge_socket(self) -> Path:
        """Return the path of munged's socket."""
        return self.folder / "munge" / "munge.sock"

    @property
    def power(self) -> Path:
        """Return the path of the pipe through which Slurm asks for nodes to be started and stopped."""
        return self.folder / "run" / "power"

    def node_env(self, node: str) -> Path:
        """Return the path of what the TaskProlog exports on `node`."""
        return self.folder / "nodes" / f"{node}.env"


def limit_nodes(view: ClusterView, nodes: int | None) -> ClusterView:
    """Return the view with at most `nodes` nodes a queue, static ones first."""
    if nodes is None:
        return view
    return replace(view, queues=tuple(_limit_queue(queue, nodes) for queue in view.queues))


def _limit_queue(queue: QueueView, nodes: int) -> QueueView:
    kept, left = [], nodes
    for cr in queue.compute_resources:
        count = min(cr.max_count, left)
        left -= count
        if count:
            kept.append(replace(cr, max_count=count, min_count=min(cr.min_count, count)))
    return replace(queue, compute_resources=tuple(kept))


def slurm_conf(view: ClusterView, layout: Layout) -> tuple[str, dict[str, str]]:
    """Return slurm.conf's text, and {setting: why} of the config's settings that it cannot have."""
    custom, left = rules.mirrored(view.slurm_settings)
    settings = Settings(rules.FIXED)
    settings.put("SelectTypeParameters", "CR_CPU_Memory" if view.memory_scheduling else "CR_CPU")
    settings.put("SuspendTime", str(_suspend_time(view)))
    for key, value in custom:
        settings.put(key, value)
    settings.scale(layout.time_scale)
    _ours(settings, view, layout)
    for key, value in layout.extra.items():
        settings.put(key, value)
    return "\n".join([*settings.lines(), "", *_nodes(view, layout)]) + "\n", left


def _suspend_time(view: ClusterView) -> int:
    minutes = view.scaledown_idletime_min
    return minutes * 60 if minutes > 0 else -1  # -1: nodes are never powered down


def _ours(settings: Settings, view: ClusterView, layout: Layout) -> None:
    folder, scale = layout.folder, layout.time_scale
    power = f"power_save_interval={rules.scaled(rules.POWER_SAVE_INTERVAL_S, scale)}"
    power += f",power_save_min_interval={rules.scaled(rules.POWER_SAVE_MIN_INTERVAL_S, scale)}"
    schedule = rules.scheduler_parameters(settings.get("SchedulerParameters"), scale)
    ours = {
        "ClusterName": "pctool",
        "SlurmctldHost": f"{layout.host}(127.0.0.1)",
        "SlurmctldPort": str(layout.ports[0]),
        "SlurmUser": layout.user,
        "SlurmdUser": layout.user,
        "AuthType": "auth/munge",
        "AuthInfo": rules.auth_info(settings.get("AuthInfo"), str(layout.munge_socket), scale),
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool/%n",
        "SlurmctldPidFile": f"{folder}/run/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/run/%n.pid",
        "SlurmctldLogFile": f"{folder}/log/slurmctld.log",
        "SlurmdLogFile": f"{folder}/log/%n.log",
        "SlurmctldParameters": f"idle_on_node_suspend,{power}",
        "SlurmdParameters": "config_overrides",  # a node may claim 192 CPUs and 2 TB
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "TaskProlog": f"{folder}/bin/task-prolog",
        "ResumeProgram": f"{folder}/bin/resume",
        "SuspendProgram": f"{folder}/bin/suspend",
        "ResumeFailProgram": f"{folder}/bin/suspend",
        **({"SuspendExcNodes": ",".join(static_nodes(view))} if static_nodes(view) else {}),
        **({"SchedulerParameters": schedule} if schedule else {}),
        **({"PluginDir": layout.plugin_dir} if layout.plugin_dir else {}),
    }
    for key, value in ours.items():
        settings.put(key, value)


def _nodes(view: ClusterView, layout: Layout) -> list[str]:
    ports = iter(layout.ports[1:])
    lines = []
    for queue in view.queues:
        for cr in queue.compute_resources:
            for name, count, static in node_ranges(cr):
                own = ",".join(str(next(ports)) for _ in range(count))
                here = f"NodeHostName={layout.host} NodeAddr=127.0.0.1 Port=[{own}]"
                lines.append(f"{node_line(cr, name, static=static)} {here}")
        lines += partition_lines(queue) if queue.compute_resources else []
    return lines


def gres_conf(view: ClusterView, layout: Layout) -> str:
    """Return gres.conf's text: what ParallelCluster writes, with device files of our own."""
    lines = [line for queue in view.queues for line in gres_lines(queue, devices=f"{layout.folder}/dev")]
    return "\n".join(["AutoDetect=off", *lines]) + "\n"


def programs(layout: Layout, slurmstepd: str) -> dict[str, bytes]:
    """Return the programs that Slurm calls, by name.

    resume and suspend write a node list to the pipe in one write of less than PIPE_BUF (4096 bytes), so that two never
    mix. slurmstepd starts the real one as a subreaper: what a task leaves behind stays below its slurmstepd, which
    kills it when the tasks have ended, as the step's cgroup does on a real cluster. Without it an orphan that holds
    the step's output open keeps the step, and then the node, in COMPLETING.
    """
    power = shlex.quote(str(layout.power))
    exports = f'{shlex.quote(str(layout.folder))}/nodes/"$SLURMD_NODENAME".env'
    prolog = f'while IFS= read -r line; do printf "%s\\n" "$line"; done < {exports}\n{_path_export(layout)}'
    return {
        "resume": f"#!/bin/sh\nprintf 'resume %s\\n' \"$1\" > {power}\n".encode(),
        "suspend": f"#!/bin/sh\nprintf 'suspend %s\\n' \"$1\" > {power}\n".encode(),
        "task-prolog": f"#!/bin/sh\n{prolog}".encode(),
        "slurmstepd": subreaper.program(slurmstepd),
    }


def _path_export(layout: Layout) -> str:
    """Return the TaskProlog's lines that put Slurm's commands on a task's PATH, once."""
    if layout.path_prefix is None:
        return ""
    prefix = shlex.quote(layout.path_prefix)
    return f'case ":$PATH:" in *:{prefix}:*) ;; *) printf "export PATH=%s:%s\\n" {prefix} "$PATH";; esac\n'


def node_env_text(env: Mapping[str, str]) -> str:
    """Return what a TaskProlog prints so that Slurm sets these variables; values are taken to the end of the line."""
    return "".join(f"export {key}={value}\n" for key, value in env.items())
