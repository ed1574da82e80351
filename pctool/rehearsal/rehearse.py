"""Run the baseline and the scenarios, each on a private Slurm of its own, through the same `submit` as in earnest."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pctool.errors import PctoolError, UsageError
from pctool.job.load import load_job
from pctool.job.submit import submit
from pctool.rehearsal.faults import install_error, newest_checkpoint
from pctool.rehearsal.observe import RehearsalError, Watcher, read_metrics
from pctool.rehearsal.scenarios import Scenario
from pctool.rehearsal.stage import Baseline, Stage
from pctool.rehearsal.verdict import (
    ADVICE,
    Problem,
    Verdict,
    find,
    first_difference,
    merge_traces,
    seconds_between,
    steps_lost,
)
from pctool.run.layout import RunDir
from pctool.run.ledger import Event, Ledger
from pctool.slurm.install import SlurmInstall
from pctool.slurm.private import PrivateCluster
from pctool.spec.cluster import ClusterView
from pctool.spec.job import JobSpec
from pctool.units import parse_signal

Say = Callable[[str], None]
COMPARE_TIMEOUT_S = 300.0
# A scenario that takes longer hangs: its processes' part, Slurm's part (several times SlurmdTimeout, the wait after a
# requeue and a replaced node's boot, all scaled), and what the job itself needs.
LIMIT_S = 480.0
SLURM_LIMIT_S = 2400.0
BASELINE_LIMIT_S = 12 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What is rehearsed, on what, and how fast its clocks run."""

    spec: JobSpec
    view: ClusterView
    folder: Path
    scale: float = 1.0
    boot_delay: float = 0.0
    spare_nodes: int = 0  # beyond what the job needs; with none it waits until a lost node is replaced
    install: SlurmInstall | None = None
    say: Say = lambda line: None

    def job(self, name: str) -> JobSpec:
        """Return the job as it runs in the scenario called `name`: its times scaled, in a run directory of its own."""
        signal = parse_signal(self.spec.signal)
        prefix = "B:" if signal.batch_only else ""
        return replace(
            self.spec,
            run_dir=str(self.folder / name),
            output=None,
            checkpoint_store=None,
            wait=max(2, round(self.spec.wait * self.scale)),
            signal=f"{prefix}{signal.name}@{max(1, min(60, round(signal.seconds * self.scale)))}",
        )


def rehearse(
    rehearsal: Rehearsal, scenarios: Sequence[Scenario], *, rounds: int = 1, earlier: Path | None = None
) -> Iterator[Verdict]:
    """Run the baseline once, then every scenario `rounds` times; yield each verdict as it is reached.

    `earlier` is the run directory of a baseline of the same job and shape, to be used instead of a new one. Raises
    RehearsalError if the job does not finish without faults, UsageError if `earlier` is of another job or shape.
    """
    baseline = reuse_baseline(rehearsal, earlier) if earlier else run_baseline(rehearsal)
    rehearsal.say(f"baseline: {baseline.steps} steps, a checkpoint every {baseline.every}")
    for number in range(rounds):
        for scenario in scenarios:
            name = scenario.name if rounds == 1 else f"{scenario.name}-{number + 1}"
            try:
                yield run_scenario(rehearsal, scenario, baseline, name=name)
            except (PctoolError, OSError, subprocess.SubprocessError) as error:
                # what the other scenarios showed must not be lost with it
                yield Verdict(scenario=scenario.name, passed=False, why=f"it could not be rehearsed: {error}")


def run_baseline(rehearsal: Rehearsal) -> Baseline:
    """Run the job uninterrupted; raise RehearsalError if even that does not finish."""
    rehearsal.say("baseline: the job, uninterrupted")
    spec = rehearsal.job("baseline")
    with _cluster(rehearsal) as cluster:
        job = submit(spec)
        run = RunDir(Path(job.run_dir))
        with Watcher(run) as watcher:
            stage = Stage(
                cluster=cluster,
                spec=spec,
                run=run,
                job_id=job.job_id,
                baseline=Baseline(run=run, steps=0, every=0, seconds=0.0),
                scale=rehearsal.scale,
                watcher=watcher,
                until=time.monotonic() + BASELINE_LIMIT_S,
            )
            info = stage.wait_end()
    events = Ledger(run.ledger).read()
    if info.state != "COMPLETED":
        raise RehearsalError(
            f"the job does not finish even without faults: {info.state}, exit code {info.exit_code}",
            where=str(run.path),
            fix=f"read {run.logs(0)} and `pctool attempts {run.path}`, then rehearse again",
        )
    return _baseline(run, events)


def reuse_baseline(rehearsal: Rehearsal, folder: Path) -> Baseline:
    """Return the baseline that an earlier rehearsal of the same job and shape left in `folder`."""
    run = RunDir(folder)
    spec = load_job(run.job_toml)
    for name in ("nodes", "nproc_per_node", "command", "checkpoint_every", "environment", "python"):
        had, want = getattr(spec, name), getattr(rehearsal.spec, name)
        if had != want:
            raise UsageError(
                f"this baseline has {name} {had}, the job to rehearse {want}",
                where=str(run.job_toml),
                fix="leave --baseline out, or name a baseline of the same job and shape",
            )
    events = Ledger(run.ledger).read()
    decided = find(events, "decided")
    if decided is None or decided.fields.get("cause") != "done":
        raise UsageError("this run did not finish uninterrupted", where=str(run.path), fix="leave --baseline out")
    return _baseline(run, events)


def _baseline(run: RunDir, events: Sequence[Event]) -> Baseline:
    committed = sorted({int(e.fields["step"]) for e in events if e.event == "committed"})
    traces = read_metrics(run)
    logged = [record["step"] for attempts in traces.values() for lines in attempts.values() for record in lines]
    steps = max([*logged, *committed], default=0)
    # the largest gap: the last one is shorter where the end is no multiple of the interval
    every = max(b - a for a, b in itertools.pairwise([0, *committed])) if committed else steps
    if steps < 20 or not committed:
        raise RehearsalError(
            f"the job did {steps} steps and {len(committed)} checkpoints, too few to lose a node in between",
            where=str(run.path),
            fix="let it run at least 20 steps and save every few of them (Run(..., every=...))",
        )
    began, ended = find(events, "claim"), find(events, "decided")
    seconds = ended.time - began.time if began and ended else 0.0
    return Baseline(run=run, steps=steps, every=every, seconds=seconds)


def run_scenario(rehearsal: Rehearsal, scenario: Scenario, baseline: Baseline, *, name: str | None = None) -> Verdict:
    """Run one scenario and judge it. What goes wrong in it becomes its verdict; the cluster is always taken down."""
    rehearsal.say(f"{scenario.name}: {scenario.summary}")
    name = name or scenario.name
    spec = rehearsal.job(name)
    environment = {}
    if scenario.raises:
        target = rehearsal.folder / f"{name}.fault"
        target.mkdir(parents=True)
        path = spec.environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH")
        environment = install_error(target, rank=spec.nodes * spec.nproc_per_node - 1, before=path)
        spec = replace(spec, environment={**spec.environment, **environment})
    with _cluster(rehearsal) as cluster:
        job = submit(spec)
        run = RunDir(Path(job.run_dir))
        with Watcher(run) as watcher:
            stage = Stage(
                cluster=cluster,
                spec=spec,
                run=run,
                job_id=job.job_id,
                baseline=baseline,
                scale=rehearsal.scale,
                watcher=watcher,
                until=time.monotonic() + LIMIT_S + SLURM_LIMIT_S * rehearsal.scale + 4 * baseline.seconds,
                fault_folder=rehearsal.folder / f"{name}.fault",
            )
            problems = _play(stage, scenario)
    return _judge(stage, scenario, problems)


def _play(stage: Stage, scenario: Scenario) -> list[Problem]:
    try:
        scenario.inject(stage)
        info = stage.wait_end()
    except PctoolError as error:
        return [Problem(str(error))]
    problems = []
    if scenario.survives and info.state != "COMPLETED":
        problems.append(Problem(f"the job ended {info.state} with exit code {info.exit_code}"))
    events = stage.ledger.read()
    for check in scenario.checks:
        problems += check(stage, events)
    return problems


def _judge(stage: Stage, scenario: Scenario, problems: list[Problem]) -> Verdict:
    events = stage.ledger.read()
    stage.watcher.check()
    lost = _lost(stage, events)
    limit = scenario.max_lost(stage)
    if limit is not None:
        problems += _unseen(stage, events)
    if scenario.survives:
        problems += _started_anew(events)
    if limit is not None and lost > limit:
        problems.append(Problem(f"{lost} steps lost, at most {limit} expected", "steps"))
    losses = samples = weights = None
    if scenario.survives:
        losses, samples, found = _compare_traces(stage)
        problems += found
        weights, found = _compare_weights(stage)
        problems += found
    restart, first = seconds_between(events, stage.ended)
    return Verdict(
        scenario=scenario.name,
        passed=not problems,
        steps_lost=lost if limit is not None else None,
        notice_to_durable_s=_notice_to_durable(stage, events),
        end_to_restart_s=restart,
        restart_to_first_step_s=first,
        losses_equal=losses,
        samples_equal=samples,
        weights_equal=weights,
        why="; ".join(f"{p.what} -> {ADVICE[p.advice].format(run=stage.run.path)}" for p in problems),
    )


def _started_anew(events: Sequence[Event]) -> list[Problem]:
    """Return a problem for an attempt that began at step 0 though an earlier one had a complete checkpoint."""
    problems, saved = [], ""
    for event in events:
        if event.event == "committed":
            saved = saved or str(event.fields["name"])
        elif event.event == "fresh" and saved:
            problems.append(Problem(f"attempt {event.attempt} began at step 0 though {saved} was complete", "steps"))
    return problems


def _last_steps(stage: Stage) -> dict[int, int]:
    """Return attempt -> the last step known to be done: by the pages, or by what the ranks logged."""
    last = {number: seen.last_step for number, seen in stage.watcher.attempts.items() if seen.last_step >= 0}
    for attempts in read_metrics(stage.run).values():
        for number, records in attempts.items():
            steps = [int(record["step"]) for record in records]
            last[number] = max([last.get(number, -1), *steps])
    return {number: step for number, step in last.items() if step >= 0}


def _unseen(stage: Stage, events: Sequence[Event]) -> list[Problem]:
    """Return a problem for an attempt that made steps nobody saw: what it lost is not known."""
    seen = _last_steps(stage)
    worked = {event.attempt for event in events if event.event == "first-step"}
    return [Problem(f"how far attempt {number} came was not seen") for number in worked - seen.keys()]


def _lost(stage: Stage, events: Sequence[Event]) -> int:
    last = _last_steps(stage)
    first = {number: seen.first_step for number, seen in stage.watcher.attempts.items() if seen.first_step >= 0}
    for event in events:
        if event.event == "first-step" and event.attempt is not None:
            first[event.attempt] = int(event.fields["step"])
    return steps_lost(last, first)


def _notice_to_durable(stage: Stage, events: Sequence[Event]) -> float | None:
    if stage.noticed is None:
        return None
    stop = find(events, "stop-step", after=stage.noticed)
    durable = stop and next(
        (
            e
            for e in events
            if e.event == "committed" and e.attempt == stop.attempt and e.fields["step"] >= stop.fields["step"]
        ),
        None,
    )
    return durable.time - stage.noticed if durable else None


def _compare_traces(stage: Stage) -> tuple[bool | None, bool | None, list[Problem]]:
    expected, _ = _traces(stage.baseline.run)
    if not expected:
        return None, None, []  # the script logs nothing: there is nothing to compare
    got, differing = _traces(stage.run)
    problems = [
        Problem(f"rank {rank}: steps {steps[:5]} differ between attempts", "losses") for rank, steps in differing
    ]
    equal: list[bool | None] = []
    for key, advice in (("loss", "losses"), ("samples", "samples")):
        logged = any(key in record for trace in expected.values() for record in trace.values())
        difference = first_difference(expected, got, key)
        equal.append(difference is None if logged or difference else None)
        if difference:
            problems.append(Problem(f"{key} differs from the uninterrupted run: {difference}", advice))
    return equal[0] if not differing else False, equal[1], problems


def _traces(run: RunDir) -> tuple[dict[int, dict[int, dict[str, object]]], list[tuple[int, list[int]]]]:
    merged = {rank: merge_traces(list(attempts.values())) for rank, attempts in read_metrics(run).items()}
    return {rank: trace for rank, (trace, _) in merged.items()}, [(r, d) for r, (_, d) in merged.items() if d]


def _compare_weights(stage: Stage) -> tuple[bool | None, list[Problem]]:
    try:
        ours, theirs = newest_checkpoint(stage.run), newest_checkpoint(stage.baseline.run)
    except RehearsalError as error:
        return None, [Problem(str(error), "weights")]
    python = stage.spec.python or sys.executable
    argv = [python, "-m", "pctool.checkpoint.compare", str(theirs), str(ours)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=COMPARE_TIMEOUT_S, check=False)
    if done.returncode not in {0, 1}:
        return None, [Problem(f"the final weights could not be compared: {done.stderr.strip()[-300:]}", "weights")]
    found = json.loads(done.stdout)
    if found["equal"]:
        return True, []
    return False, [Problem(f"the final weights differ in {found['differing'][:3]}", "weights")]


@contextlib.contextmanager
def _cluster(rehearsal: Rehearsal) -> Iterator[PrivateCluster]:
    """Bring a private cluster up for one run and make this process' Slurm commands speak to it."""
    with (
        PrivateCluster.start(
            rehearsal.view,
            nodes=rehearsal.spec.nodes + rehearsal.spare_nodes,
            time_scale=rehearsal.scale,
            boot_delay=rehearsal.boot_delay,
            install=rehearsal.install,
        ) as cluster,
        # its jobs are nobody's to look up by id later
        _environment({**cluster.env, "XDG_STATE_HOME": str(rehearsal.folder / "state")}),
    ):
        yield cluster


@contextlib.contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """Set variables for this process and what it starts; without SLURM_* and PCTOOL_* of a job we may run in."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "SRUN_", "PCTOOL_"))]:
        del os.environ[name]
    os.environ.update(extra)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
