"""Check what a job will need before it costs money: Slurm, its settings, shared storage, S3, and a node."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pctool.errors import HOLD, REQUEUE, PctoolError, SlurmError
from pctool.job.nudge import DEFAULT_CRED_EXPIRE_S
from pctool.job.probe import HERE, THERE, canary
from pctool.slurm import query
from pctool.slurm.command import Completed, run
from pctool.slurm.parse import parse_exit_codes

OK, WARN, FAIL = "ok", "warn", "fail"
NODE_S = 900.0  # an instance boots in 3 to 5 minutes on ParallelCluster, a large one in 10
# A shared file system may show a new file only when its cached listing has expired: 60 s on NFS (acdirmax).
SEEN_S = 65.0
_SEEN_PERIOD_S = 0.5
_LEAVE_S = 10.0  # for an interrupted srun to give its job back
_LEAST_CRED_EXPIRE_S = 20  # it is also the life of a launch credential: prologs and clock skew must fit in


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check: what was found and, unless it is ok, what to do."""

    name: str
    status: str  # ok | warn | fail
    found: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to check. Without `node` no job is started, so no instance either."""

    partition: str | None = None
    run_dir: Path | None = None
    store: str | None = None
    python: str = sys.executable  # the interpreter that has torch
    wait: int = 60  # srun --wait as the job spec has it
    node: bool = True
    node_timeout_s: float = NODE_S


def examine(options: Options) -> list[Check]:
    """Return every check in the order of a job's life. A check that cannot be made is a failed one."""
    checks = [_guard("munge", _munge), _guard("slurmctld", _ping), _guard("Slurm version", _version)]
    try:
        settings = query.config()
    except SlurmError as error:
        return [*checks, _failed("Slurm settings", error)]
    checks += settings_checks(settings, wait=options.wait)
    checks.append(_guard("partition", lambda: _partition(options.partition)))
    if options.store:
        checks.append(_store("S3 from here", canary(options.store)))
    if options.node:
        checks += node_checks(options)
    return checks


def verdict(checks: Sequence[Check]) -> int:
    """Return the exit code: 1 if any check failed."""
    return 1 if any(check.status == FAIL for check in checks) else 0


def as_json(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the stable JSON shape of `pctool doctor --json`."""
    return {"checks": [asdict(check) for check in checks]}


def settings_checks(settings: Mapping[str, str], *, wait: int) -> list[Check]:
    """Return the checks of slurm.conf's settings, as `scontrol show config` has them."""
    return [
        _requeue_exit(settings),
        _requeue_hold(settings),
        _file_append(settings),
        _bad_exit(settings),
        _slurmd_timeout(settings, wait),
        _requeue_delay(settings),
    ]


def _munge() -> Check:
    auth = query.config().get("AuthType", "auth/munge")
    if auth != "auth/munge":
        return Check(name="munge", status=OK, found=f"not used (AuthType={auth})")
    match = re.search(r"socket=([^,\s]+)", query.config().get("AuthInfo", ""))
    socket = ["-S", match[1]] if match else []
    credential = run(["munge", "-n", *socket]).stdout
    run(["unmunge", *socket], stdin=credential)
    return Check(name="munge", status=OK, found="a credential is made and taken")


def _ping() -> Check:
    said = query.ask(["scontrol", "ping"], check=False).stdout.strip()
    # the primary may be down while a backup serves; scontrol's exit code is 0 if any controller answers
    if re.search(r"\bis UP\b", said):
        return Check(name="slurmctld", status=OK, found=said.splitlines()[0])
    return Check(
        name="slurmctld", status=FAIL, found=said or "no answer", advice="start slurmctld on the head node, see its log"
    )


def _version() -> Check:
    major, minor = query.slurm_version()
    return Check(name="Slurm version", status=OK, found=f"{major}.{minor:02d}")


def _requeue_exit(settings: Mapping[str, str]) -> Check:
    name, found = "RequeueExit", settings.get("RequeueExit", "")
    if REQUEUE in parse_exit_codes(found):
        return Check(name=name, status=OK, found=found)
    return Check(
        name=name,
        status=WARN,
        found=f"{found or 'empty'}: jobs are requeued by `scontrol requeue` instead",
        advice=f"set RequeueExit={REQUEUE} in CustomSlurmSettings",
    )


def _requeue_hold(settings: Mapping[str, str]) -> Check:
    name, found = "RequeueExitHold", settings.get("RequeueExitHold", "")
    if HOLD in parse_exit_codes(found):
        return Check(name=name, status=OK, found=found)
    return Check(
        name=name,
        status=WARN,
        found=f"{found or 'empty'}: jobs are held by `scontrol requeuehold` instead",
        advice=f"set RequeueExitHold={HOLD} in CustomSlurmSettings",
    )


def _file_append(settings: Mapping[str, str]) -> Check:
    name = "JobFileAppend"
    if settings.get("JobFileAppend") == "1":
        return Check(name=name, status=OK, found="1")
    return Check(
        name=name,
        status=WARN,
        found="0: pctool's scripts append by themselves, others lose their log at a requeue",
        advice="set JobFileAppend=1 in CustomSlurmSettings, or use --open-mode=append",
    )


def _bad_exit(settings: Mapping[str, str]) -> Check:
    found = settings.get("KillOnBadExit", "0")
    return Check(name="KillOnBadExit", status=OK, found=f"{found} (pctool's scripts set it for their own step)")


def _slurmd_timeout(settings: Mapping[str, str], wait: int) -> Check:
    """Compare how long survivors wait for a silent node with how long Slurm takes to notice it."""
    name = "SlurmdTimeout"
    match = re.match(r"\d+", settings.get(name, ""))
    timeout = int(match[0]) if match else 0
    if timeout == 0:
        return Check(
            name=name,
            status=WARN,
            found="0: Slurm never notices a dead node by itself",
            advice=f"set SlurmdTimeout to 180, and keep srun's --wait ({wait} s) below it",
        )
    if 0 < wait < timeout:
        return Check(name=name, status=OK, found=f"{timeout} s, above srun's --wait of {wait} s")
    return Check(
        name=name,
        status=WARN,
        found=f"{timeout} s, not above srun's --wait of {wait} s: Slurm may end a job before it is decided on",
        advice=f"choose a wait below {timeout} in the job spec",
    )


def _requeue_delay(settings: Mapping[str, str]) -> Check:
    name = "requeue delay"
    match = re.search(r"cred_expire=(\d+)", settings.get("AuthInfo", ""))
    expire = int(match[1]) if match else DEFAULT_CRED_EXPIRE_S
    found = f"{expire + 1} s (cred_expire={expire})"
    if expire < _LEAST_CRED_EXPIRE_S:
        return Check(
            name=name,
            status=WARN,
            found=f"{found}: credentials may expire before a job's processes have started",
            advice=f"set cred_expire to {_LEAST_CRED_EXPIRE_S} or more in AuthInfo",
        )
    return Check(name=name, status=OK, found=f"{found}; `pctool nudge --watch` ends it early")


def _partition(wanted: str | None) -> Check:
    known = {partition.name: partition for partition in query.partitions()}
    chosen = known.get(wanted) if wanted else next((one for one in known.values() if one.default), None)
    if chosen is None:
        found = f"{wanted!r} is not on this cluster" if wanted else "no default partition"
        advice = f"choose one with -p: {', '.join(known) or 'there is none'}"
        return Check(name="partition", status=FAIL, found=found, advice=advice)
    if not chosen.up:
        state = chosen.fields.get("State", "?")
        advice = f"ask who runs the cluster, or `scontrol update PartitionName={chosen.name} State=UP`"
        return Check(name="partition", status=FAIL, found=f"{chosen.name} is {state}", advice=advice)
    return Check(name="partition", status=OK, found=f"{chosen.name}, {chosen.total_nodes} nodes")


def node_checks(options: Options) -> list[Check]:
    """Run the probe on one node and return what it saw there."""
    nonce = secrets.token_hex(8)
    folder = options.run_dir / f".pctool-doctor-{nonce}" if options.run_dir else None
    made: Path | None = None
    try:
        if folder is not None:
            made = _make(folder)
            (folder / HERE).write_text(nonce)
        answer = _probe(options, folder, nonce)
        return _node_findings(options, folder, answer)
    except SlurmError as error:
        return [_failed("node", error)]
    except OSError as error:
        found = f"{error.filename}: {error.strerror}"
        return [Check(name="run directory", status=FAIL, found=found, advice="choose a folder you may write to")]
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _make(folder: Path) -> Path:
    """Make a folder and return the highest one that was not there before."""
    missing = [folder, *(parent for parent in folder.parents if not parent.exists())]
    folder.mkdir(parents=True)
    return missing[-1]


def _probe(options: Options, folder: Path | None, nonce: str) -> dict[str, Any]:
    words = {"folder": str(folder) if folder else None, "nonce": nonce}
    question = json.dumps({**words, "store": options.store, "python": options.python})
    name, limit = f"pctool-doctor-{nonce}", max(0.1, options.node_timeout_s)
    argv = [
        # a killed srun leaves its job behind to start, and boot an instance, later: an interrupted one gives it back
        "timeout", "--foreground", "--signal=INT", f"--kill-after={_LEAVE_S:.0f}", f"{limit:.1f}",
        "srun", "--quit-on-interrupt", "--quiet", "--nodes=1", "--ntasks=1", "--time=10", f"--job-name={name}",
        "--mpi=none", *([f"--partition={options.partition}"] if options.partition else []),
        sys.executable, "-m", "pctool.job.probe", question,
    ]  # fmt: skip
    began = time.monotonic()
    with _cancelled_on_error(name):
        done = query.ask(argv, timeout=limit + 2 * _LEAVE_S, check=False)
        return _answer(done, limit if time.monotonic() - began >= limit else None)


@contextmanager
def _cancelled_on_error(job_name: str) -> Iterator[None]:
    """Cancel the probe's job unless all goes well. Raise SlurmError naming it where Slurm does not take that."""
    try:
        yield
    except BaseException:  # Ctrl-C too
        argv = ["scancel", "--quiet", "--me", f"--name={job_name}"]
        try:
            query.ask(argv)
        except SlurmError as error:
            what = f"the probe's job may still start a node: {error.what}"
            raise SlurmError(what, fix=f"cancel it with `{' '.join(argv)}`") from error
        raise


def _answer(done: Completed, waited: float | None) -> dict[str, Any]:
    """Return what the probe printed; `waited` says for how long it was waited for, where that was too long."""
    if done.code == 0:
        for line in reversed(done.stdout.splitlines()):
            if line.startswith("{"):
                return dict(json.loads(line))
    if waited is not None:
        raise SlurmError(
            f"no node answered within {waited:g} s; the probe's job was cancelled",
            fix="see `sinfo` and the partition's limits, or wait longer with --node-timeout",
        )
    said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()
    raise SlurmError(
        f"the probe did not run on a node (exit code {done.code}): {said[-1]}",
        fix=f"make {sys.executable} and pctool available on the nodes, e.g. in a virtual environment on shared storage",
    )


def _node_findings(options: Options, folder: Path | None, answer: Mapping[str, Any]) -> list[Check]:
    checks = [Check(name="node", status=OK, found=f"{answer['node']} runs pctool")]
    if folder is not None:
        checks.append(_shared(folder, answer["shared"]))
    if options.store:
        checks.append(_store("S3 from a node", answer["store"]))
    return [*checks, _imds(answer["imds"]), _torch(options.python, answer["torch"])]


def _shared(folder: Path, seen_there: str) -> Check:
    name, run_dir = "run directory", folder.parent
    if seen_there:
        found = f"a file written here is not seen on the node: {seen_there}"
    elif not _seen_here(folder / THERE):
        found = f"a file written on the node is not seen here within {SEEN_S:.0f} s"
    else:
        return Check(name=name, status=OK, found=f"{run_dir} is shared, both ways")
    return Check(name=name, status=FAIL, found=found, advice="choose a run directory on FSx, EFS or the shared /home")


def _seen_here(path: Path) -> bool:
    """Return whether the node's file shows up. Polled: no event tells of another host's write."""
    deadline = time.monotonic() + SEEN_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_SEEN_PERIOD_S)
    return True


def _store(name: str, wrong: str) -> Check:
    if not wrong:
        return Check(name=name, status=OK, found="write once, look, read, delete")
    what, _, fix = wrong.partition("\n  -> ")
    return Check(name=name, status=FAIL, found=what, advice=fix or "correct the store's address or its rights")


def _imds(answer: Mapping[str, str]) -> Check:
    name = "instance metadata"
    if "error" not in answer:
        return Check(name=name, status=OK, found=f"{answer['instance']} {answer['type']}".strip())
    what, _, fix = answer["error"].partition("\n  -> ")
    return Check(
        name=name,
        status=WARN,
        found=f"{what}: spot notices are not heard of on that node",
        advice=fix or "allow the instance metadata service (IMDSv2) on the nodes",
    )


def _torch(python: str, answer: Mapping[str, str]) -> Check:
    if "error" not in answer:
        return Check(name="torch", status=OK, found=f"{answer['version']}, {answer['gpus']} GPUs seen by {python}")
    return Check(
        name="torch",
        status=FAIL,
        found=answer["error"],
        advice="install torch for that interpreter on shared storage, or name the one that has it with --python",
    )


def _guard(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except PctoolError as error:
        return _failed(name, error)


def _failed(name: str, error: PctoolError) -> Check:
    return Check(name=name, status=FAIL, found=error.what, advice=error.fix or "see the message")
