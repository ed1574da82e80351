"""The keys of a job spec: how TOML and flags name each field of JobSpec, and the type each takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TEXT, WHOLE, SWITCH, WORDS, SLURM_VALUE = "text", "whole number", "true or false", "list of words", "text or number"
STEPS_OR_TIME = 'number of steps, a time, or "auto"'

CHECKPOINT = "checkpoint"
ENVIRONMENT = "environment"


@dataclass(frozen=True)
class Key:
    """One key: the JobSpec field it fills and the kind of value it takes."""

    field: str
    kind: str


JOB_KEYS: Mapping[str, Key] = {
    "job-name": Key("name", TEXT),
    "command": Key("command", WORDS),
    "run-dir": Key("run_dir", TEXT),
    "nodes": Key("nodes", WHOLE),
    "gpus-per-node": Key("gpus_per_node", WHOLE),
    "ranks-per-node": Key("ranks_per_node", WHOLE),
    "cpus-per-task": Key("cpus_per_task", WHOLE),
    "mem": Key("mem", SLURM_VALUE),
    "partition": Key("partition", TEXT),
    "time": Key("time", SLURM_VALUE),
    "output": Key("output", TEXT),
    "requeue": Key("requeue", SWITCH),
    "signal": Key("signal", TEXT),
    "constraint": Key("constraint", TEXT),
    "account": Key("account", TEXT),
    "qos": Key("qos", TEXT),
    "exclusive": Key("exclusive", SWITCH),
    "array": Key("array", SLURM_VALUE),
    "dependency": Key("dependency", TEXT),
    "chdir": Key("chdir", TEXT),
    "python": Key("python", TEXT),
    "template": Key("template", TEXT),
    "wait": Key("wait", WHOLE),
    "stop-signal": Key("stop_signal", TEXT),
    "max-stalled": Key("max_stalled", WHOLE),
}

CHECKPOINT_KEYS: Mapping[str, Key] = {
    "store": Key("checkpoint_store", TEXT),
    "every": Key("checkpoint_every", STEPS_OR_TIME),
    "keep": Key("checkpoint_keep", WHOLE),
    "keep-for": Key("checkpoint_keep_for", TEXT),
    "keep-every": Key("checkpoint_keep_every", WHOLE),
    "mirror": Key("checkpoint_mirror", TEXT),
    "mirror-mbps": Key("checkpoint_mirror_mbps", WHOLE),
}

HETEROGENEOUS = ("hetjob", "packjob", "het-group", "pack-group")


def key_of(field: str) -> str:
    """Return how the job file spells a field: gpus_per_node -> gpus-per-node, checkpoint_every -> checkpoint.every."""
    for key, entry in JOB_KEYS.items():
        if entry.field == field:
            return key
    for key, entry in CHECKPOINT_KEYS.items():
        if entry.field == field:
            return f"{CHECKPOINT}.{key}"
    return field
