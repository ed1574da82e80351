"""Pure parsers of what Slurm's commands print. They start nothing.

The forms of `scontrol show` over several lines are read, not `-o`: there a free text (comment, job name, command)
ends where its line ends, while on one line ` Reason=...` inside a comment cannot be told from the next field.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from pctool.errors import SlurmError, UsageError
from pctool.units import parse_time

_FIELD = re.compile(r"(?:^|(?<=\s))([A-Za-z][\w/:&.\[\]-]*)=")
_FREE_TEXT = frozenset(
    {"JobName", "Comment", "AdminComment", "SystemComment", "Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Extra"}
    | {"OS", "SubmitLine"}
)  # these take the rest of their line
_RECORD = re.compile(r"^(JobId|NodeName|PartitionName)=")
_NOTHING = frozenset({"", "(null)", "N/A", "n/a", "None", "NONE", "Unknown", "UNLIMITED", "INFINITE"})


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """One job as `scontrol show job` has it. Times are seconds since the epoch, None where Slurm knows none."""

    job_id: str  # the id of this very job; an array task has one of its own once it runs
    name: str
    user: str
    state: str
    reason: str
    comment: str | None
    requeue: bool
    restarts: int
    priority: int  # 0: held
    exit_code: int
    submit_time: float | None
    eligible_time: float | None
    start_time: float | None
    end_time: float | None
    time_limit: int | None  # seconds
    partition: str
    node_list: str
    batch_host: str | None
    num_nodes: int
    work_dir: str | None
    std_out: str | None
    array_job_id: str | None = None
    array_task_id: str | None = None  # a number, or a list such as 3-9 for tasks still waiting together
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Return the id as people write it: 123, or 123_4 for an array task."""
        return f"{self.array_job_id}_{self.array_task_id}" if self.array_job_id else self.job_id

    @property
    def held(self) -> bool:
        """Return whether the job waits for `scontrol release`."""
        return self.priority == 0 or self.reason.startswith("JobHeld") or self.state in {"SPECIAL_EXIT", "REQUEUE_HOLD"}


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """One node as `scontrol show node` has it."""

    name: str
    addr: str
    hostname: str
    states: frozenset[str]  # IDLE, DYNAMIC_NORM, POWERED_DOWN, DRAIN ... without marks
    cpus: int
    real_memory_mib: int
    gres: str | None
    features: tuple[str, ...]
    reason: str | None
    version: str | None
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PartitionInfo:
    """One partition as `scontrol show partition` has it."""

    name: str
    default: bool
    up: bool
    nodes: str  # a node list, folded
    total_nodes: int
    max_nodes: int | None  # a job's limit; None: no limit
    max_time: int | None  # seconds; None: no limit
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class QueueLine:
    """One line of `squeue -o QUEUE_FORMAT`."""

    label: str  # 123, 123_4
    job_id: str
    state: str
    reason: str
    comment: str | None


QUEUE_FORMAT = "%i|%A|%T|%r|%k"  # the comment last: it may hold the separator


def parse_records(text: str) -> list[dict[str, str]]:
    """Return one dict a record of `scontrol show job|node|partition` (the form of several lines)."""
    records: list[dict[str, str]] = []
    for line in text.splitlines():
        if _RECORD.match(line):
            records.append({})
        if records:
            records[-1].update(parse_fields(line))
    return records


def parse_fields(line: str) -> dict[str, str]:
    """Return the `Key=value` fields of one line; a free text takes the rest of the line."""
    found: dict[str, str] = {}
    matches = list(_FIELD.finditer(line))
    for match, after in zip(matches, [*matches[1:], None], strict=False):
        if match[1] in _FREE_TEXT:
            found[match[1]] = line[match.end() :].strip()
            break
        found[match[1]] = line[match.end() : after.start() if after else None].strip()
    return found


def parse_jobs(text: str) -> list[JobInfo]:
    """Return the jobs of `scontrol show job`. Raise SlurmError for a record without the fields every job has."""
    return [_job(record) for record in parse_records(text) if "JobId" in record]


def _job(record: Mapping[str, str]) -> JobInfo:
    try:
        return JobInfo(
            job_id=record["JobId"],
            name=record.get("JobName", ""),
            user=record["UserId"].partition("(")[0],
            state=record["JobState"],
            reason=record.get("Reason", "None"),
            comment=_text(record.get("Comment")),
            requeue=record.get("Requeue") == "1",
            restarts=int(record.get("Restarts", "0")),
            priority=int(record.get("Priority", "1")),
            exit_code=int(record.get("ExitCode", "0:0").partition(":")[0]),
            submit_time=parse_timestamp(record.get("SubmitTime")),
            eligible_time=parse_timestamp(record.get("EligibleTime")),
            start_time=parse_timestamp(record.get("StartTime")),
            end_time=parse_timestamp(record.get("EndTime")),
            time_limit=_limit(record.get("TimeLimit")),
            partition=record.get("Partition", ""),
            node_list=_text(record.get("NodeList")) or "",
            batch_host=_text(record.get("BatchHost")),
            num_nodes=int(record.get("NumNodes", "0").partition("-")[0]),
            work_dir=_text(record.get("WorkDir")),
            std_out=_text(record.get("StdOut")),
            array_job_id=record.get("ArrayJobId"),
            # newer Slurm writes the throttle behind it: 2%1
            array_task_id=record["ArrayTaskId"].partition("%")[0] if "ArrayTaskId" in record else None,
            fields=dict(record),
        )
    except (KeyError, ValueError) as error:
        raise _unreadable("scontrol show job", error) from error


def parse_nodes(text: str) -> list[NodeInfo]:
    """Return the nodes of `scontrol show node`."""
    return [_node(record) for record in parse_records(text) if "NodeName" in record]


def _node(record: Mapping[str, str]) -> NodeInfo:
    try:
        return NodeInfo(
            name=record["NodeName"],
            addr=record.get("NodeAddr", record["NodeName"]),
            hostname=record.get("NodeHostName", record["NodeName"]),
            states=frozenset(re.findall(r"[A-Z_]+", record["State"])),
            cpus=int(record.get("CPUTot", "0")),
            real_memory_mib=int(record.get("RealMemory", "0")),
            gres=_text(record.get("Gres")),
            features=tuple((_text(record.get("AvailableFeatures")) or "").split(",")) if _features(record) else (),
            reason=_text(record.get("Reason")),
            version=_text(record.get("Version")),
            fields=dict(record),
        )
    except (KeyError, ValueError) as error:
        raise _unreadable("scontrol show node", error) from error


def _features(record: Mapping[str, str]) -> bool:
    return _text(record.get("AvailableFeatures")) is not None


def parse_partitions(text: str) -> list[PartitionInfo]:
    """Return the partitions of `scontrol show partition`."""
    return [_partition(record) for record in parse_records(text) if "PartitionName" in record]


def _partition(record: Mapping[str, str]) -> PartitionInfo:
    try:
        return PartitionInfo(
            name=record["PartitionName"],
            default=record.get("Default") == "YES",
            up=record.get("State") == "UP",
            nodes=_text(record.get("Nodes")) or "",
            total_nodes=int(record.get("TotalNodes", "0")),
            max_nodes=_count(record.get("MaxNodes")),
            max_time=_limit(record.get("MaxTime")),
            fields=dict(record),
        )
    except (KeyError, ValueError) as error:
        raise _unreadable("scontrol show partition", error) from error


def parse_config(text: str) -> dict[str, str]:
    """Return `scontrol show config` as a dict; '(null)' becomes an empty string."""
    pairs = (line.split(" = ", 1) for line in text.splitlines() if " = " in line)
    return {key.strip(): "" if value.strip() == "(null)" else value.strip() for key, value in pairs}


def parse_queue(text: str) -> list[QueueLine]:
    """Return the jobs of `squeue -h -o QUEUE_FORMAT`; lines of another shape are left out."""
    rows = (line.split("|", 4) for line in text.splitlines())
    return [
        QueueLine(label=row[0], job_id=row[1], state=row[2], reason=row[3], comment=_text(row[4]))
        for row in rows
        if len(row) == 5
    ]


def parse_version(text: str) -> tuple[int, int]:
    """Return (22, 5) for what `scontrol --version` prints, 'slurm-wlm 22.05.8'. Raise SlurmError for anything else."""
    match = re.search(r"\bslurm\S*\s+(\d+)\.(\d+)", text)
    if not match:
        raise SlurmError(f"not a Slurm version: {text.strip()!r}", fix="see what `scontrol --version` prints")
    return int(match[1]), int(match[2])


def parse_exit_codes(text: str) -> frozenset[int]:
    """Return the codes of RequeueExit or RequeueExitHold: '85', '1,5-8', '' or '(null)'."""
    codes: set[int] = set()
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", text):
        codes.update(range(int(low), int(high or low) + 1))
    return frozenset(codes)


def parse_timestamp(text: str | None) -> float | None:
    """Return seconds since the epoch for Slurm's local time 2026-11-30T07:56:35; None for Unknown, N/A, None."""
    try:
        return time.mktime(time.strptime(text or "", "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def _text(value: str | None) -> str | None:
    return None if value is None or value.strip() in _NOTHING else value.strip()


def _limit(value: str | None) -> int | None:
    try:
        return parse_time(value) if value and value not in _NOTHING else None
    except UsageError:
        return None  # Partition_Limit: the partition's own limit holds


def _count(value: str | None) -> int | None:
    return int(value) if value and value.isdigit() else None


def _unreadable(command: str, error: Exception) -> SlurmError:
    what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
    return SlurmError(f"`{command}` printed a record that cannot be read: {what}", fix="report it with that output")
