"""What a node that cannot take part means for the job."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pctool.node import checks
from pctool.node.config import LaunchConfig, read_config
from pctool.node.refusal import Refusal, check_node, has_started
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.records import Claim, claim_bytes


def config(tmp_path: Path, *, python: str = sys.executable, script: str = "train.py") -> LaunchConfig:
    """Return what the launch of n1 is told, in attempt 2 of job 7."""
    run = RunDir(tmp_path / "run")
    if not run.attempt(2).path.exists():
        run.attempt(2).path.mkdir(parents=True)
        claim = Claim(job_id="7", restart=2, nonce="x", host="n0", nodes=("n0", "n1"), time=time.time(), hub="a:1")
        run.attempt(2).claim.write_bytes(claim_bytes(claim))
    (tmp_path / "train.py").touch()
    environ = {
        "PCTOOL_RUN_DIR": str(run.path),
        "PCTOOL_ATTEMPT": "2",
        "PCTOOL_NONCE": "x",
        "PCTOOL_HUB": "h:1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURMD_NODENAME": "n1",
        "SLURM_JOB_ID": "7",
    }
    return read_config(
        environ, per_node=1, python=python, script=[str(tmp_path / script)], stop_signal=None, poll_s=1.0
    )


def started(tmp_path: Path, *, job: str) -> None:
    """Write that attempt 1 has started, as a job's."""
    ledger = Ledger(tmp_path / "run" / "ledger.jsonl")
    ledger.append("claim", attempt=1, job_id=job)
    ledger.append("started", attempt=1, nodes=["n0", "n1"])


def refused(config: LaunchConfig, begin: Callable[[], None] = lambda: None) -> Refusal:
    result = check_node(config, begin)
    assert isinstance(result, Refusal)
    return result


def breaks(number: int) -> Callable[[], None]:
    def begin() -> None:
        raise OSError(number, "no", "n1.json")

    return begin


def test_whether_an_earlier_attempt_has_started(tmp_path: Path) -> None:
    one = config(tmp_path)
    Ledger(one.run.ledger).append("started", attempt=2)  # itself
    assert not has_started(one, job_only=False)
    started(tmp_path, job="6")
    assert has_started(one, job_only=False)
    assert not has_started(one, job_only=True)
    started(tmp_path, job="7")
    assert has_started(one, job_only=True)


@pytest.mark.parametrize(
    ("number", "cause"), [(errno.EDQUOT, "peer-lost"), (errno.ESTALE, "peer-lost"), (errno.EACCES, "program-error")]
)
def test_a_file_system_that_refuses_is_no_error_of_the_program_but_a_forbidden_one_is(
    tmp_path: Path, number: int, cause: str
) -> None:
    refusal = refused(config(tmp_path), breaks(number))
    assert (refusal.cause, refusal.recorded) == (cause, False)
    assert "n1 cannot write" in refusal.error.what


@pytest.mark.parametrize(("job", "cause"), [(None, "program-error"), ("6", "program-error"), ("7", "peer-lost")])
def test_what_a_new_node_lacks_ends_only_a_job_that_never_had_it(tmp_path: Path, job: str | None, cause: str) -> None:
    one = config(tmp_path, script="gone.py")
    if job is not None:
        started(tmp_path, job=job)
    assert refused(one).cause == cause
    assert refused(config(tmp_path, python="/no/python")).cause == cause


def test_an_interpreter_that_is_slow_or_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, broken = tmp_path / "slow", tmp_path / "broken"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    broken.write_text("#!/bin/sh\necho 'libpython3.so: cannot open shared object file' >&2\nexit 127\n")
    for path in (slow, broken):
        path.chmod(0o755)
    monkeypatch.setattr(checks, "_IMPORT_S", 0.5)
    refusal = refused(config(tmp_path, python=str(slow)))
    assert refusal.cause == "peer-lost"
    assert "has not answered" in refusal.error.what
    monkeypatch.setattr(checks, "_IMPORT_S", 60.0)
    what = refused(config(tmp_path, python=str(broken))).error.what
    assert "ended with 127" in what
    assert "libpython3.so" in what
    assert "has no torch" not in what


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.ESHUTDOWN])
def test_a_run_directory_that_cannot_even_be_looked_at_is_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    one = config(tmp_path)

    def deny(*_args: object, **_kwargs: object) -> object:
        raise OSError(number, "no")

    monkeypatch.setattr(Path, "read_text", deny)
    monkeypatch.setattr(Path, "stat", deny)
    refusal = refused(one)
    assert refusal.unseen
    assert "n1 cannot see" in refusal.error.what
