"""One scenario's stage: the private cluster, the submitted job, and the levers to pull while it runs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pctool.rehearsal.observe import RehearsalError, Watcher, wait_event
from pctool.run.layout import RunDir
from pctool.run.ledger import Event, Ledger
from pctool.run.records import read_claim
from pctool.slurm import query
from pctool.slurm.command import run as run_command
from pctool.slurm.parse import JobInfo
from pctool.slurm.private.client import Down, PrivateCluster
from pctool.slurm.states import is_ended
from pctool.spec.job import JobSpec

JOB_PERIOD_S = 0.25  # how often the queue is asked; slurmctld itself schedules once a second


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The uninterrupted run that every scenario is compared with."""

    run: RunDir
    steps: int  # the last step, counted from 1
    every: int  # steps between checkpoints, as committed
    seconds: float  # from its claim to its end


@dataclass
class Stage:
    """A submitted job on a private cluster. `scale` multiplies every time of the cluster."""

    cluster: PrivateCluster
    spec: JobSpec
    run: RunDir
    job_id: str
    baseline: Baseline
    scale: float
    watcher: Watcher
    until: float  # monotonic; a job that is not over by then hangs
    fault_folder: Path | None = None  # where an exception was prepared
    ended: dict[int, float] = field(default_factory=dict)  # attempt -> when a node of it was killed
    killed: str | None = None  # the node that was killed in attempt 0
    cancelled: float | None = None  # when the job was cancelled
    noticed: float | None = None  # when the first notice was given
    deadline: float | None = None

    @property
    def ledger(self) -> Ledger:
        """Return the run's ledger."""
        return Ledger(self.run.ledger)

    def nodes(self, attempt: int = 0) -> tuple[str, ...]:
        """Return the nodes of an attempt, in rank order."""
        claim = read_claim(self.run.attempt(attempt))
        if claim is None:
            raise RehearsalError(f"attempt {attempt} has no claim", where=str(self.run.attempt(attempt).claim))
        return claim.nodes

    def at(self, share: float, *, of_interval: float = 0.5) -> int:
        """Return a step about `share` through the run and `of_interval` through a checkpoint interval."""
        every = max(1, self.baseline.every)
        start = int(self.baseline.steps * share) // every * every
        return min(start + max(1, int(every * of_interval)), self.baseline.steps - 3)

    def need_checkpoint_before(self, step: int) -> None:
        """Raise RehearsalError unless the baseline saved before `step`."""
        if step <= self.baseline.every:
            raise RehearsalError(
                f"the job saves every {self.baseline.every} steps, so at step {step} it has no checkpoint yet",
                fix="let it save at least three times (Run(..., every=...), or `every` in [checkpoint])",
            )

    def wait_step(self, step: int, attempt: int = 0) -> None:
        """Wait until the leading rank has finished `step` in `attempt`."""
        self.watcher.wait_page(attempt, lambda page: page.step >= step, self._over_for(attempt, f"step {step}"))

    def wait_saving(self, attempt: int = 0) -> None:
        """Wait until a save is in progress."""
        self.watcher.wait_page(
            attempt, lambda page: max(page.saving_since, page.writing_since) > 0, self._over_for(attempt, "a save")
        )

    def wait_event(
        self, name: str, attempt: int | None = None, *, after_attempt: int | None = None, **fields: object
    ) -> Event:
        """Wait for a ledger event of that name, attempt (or any attempt after one) and fields."""

        def match(event: Event) -> bool:
            return (
                event.event == name
                and attempt in {None, event.attempt}
                and (after_attempt is None or (event.attempt or 0) > after_attempt)
                and all(event.fields.get(key) == value for key, value in fields.items())
            )

        return wait_event(self.ledger, match, self._over_for(attempt, name), what=f"ledger event {name}")

    def wait_job(self, ready: Callable[[JobInfo], bool], what: str) -> JobInfo:
        """Wait until `scontrol show job` shows it `ready`; raise RehearsalError once it has ended otherwise."""
        while True:
            info = query.show_job(self.job_id)
            if info is not None and ready(info):
                return info
            if info is None or is_ended(info.state):
                raise RehearsalError(f"the job ended ({info.state if info else 'unknown'}) while waiting for {what}")
            if time.monotonic() > self.until:
                raise RehearsalError(f"the job hangs: {info.state} ({info.reason}) while waiting for {what}")
            time.sleep(JOB_PERIOD_S)

    def wait_end(self) -> JobInfo:
        """Wait until the job has ended for good and return what Slurm says of it."""
        return self.wait_job(lambda info: is_ended(info.state), "its end")

    def notice(self, node: str, *, lead_s: float = 120.0) -> None:
        """Give a node its spot notice; the instance dies when the notice says."""
        self.noticed = self.noticed or time.time()
        when = self.cluster.notice(node, lead_s=lead_s)
        self.deadline = min(self.deadline or when, when)

    def kill(self, node: str, attempt: int = 0, *, down_after: Down = "clustermgtd") -> None:
        """Take a node away without a notice."""
        self.ended.setdefault(attempt, time.time())
        self.killed = self.killed or node
        self.cluster.kill(node, down_after=down_after)

    def rank_pids(self, node: str) -> list[int]:
        """Return the pids of the job's rank processes on a node."""
        return [pid for pid in self.cluster.processes(node=node, job=self.job_id) if is_rank(pid)]

    def ranks(self, *nodes: str) -> list[int]:
        """Return the pids of the ranks on these nodes; raise RehearsalError if there are none."""
        pids = [pid for node in nodes for pid in self.rank_pids(node)]
        if not pids:
            raise RehearsalError(f"no rank of the job runs on {', '.join(nodes)}")
        return pids

    def writers(self, node: str) -> list[int]:
        """Return the pids of the job's checkpoint writers on a node; raise RehearsalError if there are none."""
        pids = [pid for pid in self.cluster.processes(node=node, job=self.job_id) if is_writer(pid)]
        if not pids:
            raise RehearsalError(f"no checkpoint writer of the job runs on {node}")
        return pids

    @contextlib.contextmanager
    def frozen(self, pids: Sequence[int]) -> Iterator[None]:
        """Stop these processes, as a hung file system would, for as long as the block runs."""
        _signal_all(pids, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal_all(pids, signal.SIGCONT)

    def scontrol(self, *words: str, check: bool = True) -> None:
        """Run scontrol as an operator would."""
        run_command(["scontrol", *words], check=check)

    def _over_for(self, attempt: int | None, what: str) -> Callable[[], str | None]:
        def alive() -> str | None:
            info = query.show_job(self.job_id)
            if info is None or is_ended(info.state):
                return f"the job ended ({info.state if info else 'unknown'}) before {what} of attempt {attempt}"
            if time.monotonic() > self.until:
                return f"the job hangs: {info.state} ({info.reason}), no {what} of attempt {attempt}"
            return None

        return alive


def is_rank(pid: int) -> bool:
    """Return whether a process is one that torchrun started as a rank."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended meanwhile
    names = {entry.split(b"=", 1)[0] for entry in environ}
    return {b"RANK", b"LOCAL_RANK", b"TORCHELASTIC_RUN_ID"} <= names


def is_writer(pid: int) -> bool:
    """Return whether a process writes checkpoints."""
    try:
        return b"pctool.checkpoint.writer" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # it ended between listing and signalling
