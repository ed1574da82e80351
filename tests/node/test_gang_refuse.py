"""What keeps a node from taking part: a clear message, exit code 2, a record, and nobody left waiting."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from gang_harness import HERE, Gang

from pctool.node.wire import PORTS
from pctool.run.ledger import Ledger
from pctool.run.records import NodeExit, write_node_exit

MakeGang = Callable[..., Gang]

LAUNCH = [sys.executable, "-m", "pctool", "launch"]


def test_a_heterogeneous_job_is_refused(gang: MakeGang) -> None:
    one = gang(nodes=1)
    one.start_command([*LAUNCH, "--", "train.py"], SLURM_HET_SIZE="2")
    assert one.codes() == [2]
    assert "heterogeneous" in one.err(0)


@pytest.mark.parametrize("missing", ["PCTOOL_RUN_DIR", "PCTOOL_NONCE", "PCTOOL_HUB", "SLURM_NODEID", "SLURMD_NODENAME"])
def test_a_launch_outside_of_a_claimed_attempt_says_so(gang: MakeGang, missing: str) -> None:
    one = gang(nodes=1)
    environ = {name: value for name, value in one.environ(0).items() if name != missing}
    done = subprocess.run(
        [*LAUNCH, "--", "train.py"], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert missing in done.stderr
    assert "srun" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--nproc-per-node", "0", "--", "x.py"],
        ["--stop-signal", "NO", "--", "x"],
        ["--stop-signal", "KILL", "--", "x"],
        ["--stop-signal", "19", "--", "x"],
    ],
)
def test_bad_flags(gang: MakeGang, arguments: list[str]) -> None:
    one = gang(nodes=1)
    one.start_command([*LAUNCH, *arguments])
    assert one.codes() == [2]
    assert "Traceback" not in one.err(0)
    assert any(said in one.err(0) for said in ("no training script", "--nproc-per-node", "--stop-signal"))


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_HET_SIZE": "2"},
        {"SLURM_LOCALID": "1"},
        {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:99999"},
        {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "ftp://x"},
        {"PCTOOL_HUB": "nonsense"},
    ],
)
def test_a_launch_that_cannot_even_begin_leaves_a_record(gang: MakeGang, environ: dict[str, str]) -> None:
    one = gang(nodes=1)
    one.start_command([*LAUNCH, "--", "train.py"], nodes=None, **environ)
    assert one.codes() == [2], one.story()
    record = one.records()["n0"]
    assert (record.cause, record.code) == ("program-error", 2)
    assert record.why
    assert record.why in one.err(0)


def test_a_launch_of_another_attempt_leaves_no_record_in_this_one(gang: MakeGang) -> None:
    one = gang(nodes=1)
    one.start_command([*LAUNCH, "--", "train.py"], SLURM_LOCALID="1", PCTOOL_NONCE="other")
    assert one.codes() == [2]
    assert one.causes() == ["none"]


def test_an_error_on_record_outlives_the_end_of_the_launch_beside_it(gang: MakeGang) -> None:
    """Of two launches on a node srun ends the one for the error of the other."""
    one = gang(nodes=1)
    one.start("trainer.py", "steps=1000")
    one.stepping()
    record = NodeExit(node="n0", cause="program-error", code=2, time=1.0, why="two launches on one node")
    write_node_exit(one.attempt, record)
    one.processes[0].terminate()
    one.codes()
    assert one.records()["n0"] == record


def test_a_script_that_is_not_there(gang: MakeGang) -> None:
    one = gang(nodes=2, timing={"refuse_s": 2})
    one.start("/nowhere/train.py")
    assert one.codes() == [2, 2], one.story()
    assert "n1 cannot see the script /nowhere/train.py" in one.err(1)
    assert one.causes() == ["program-error", "program-error"]


def test_an_interpreter_without_torch(gang: MakeGang, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    one = gang(nodes=2)
    script = str(HERE / "gang_scripts" / "trainer.py")
    one.start_command([*LAUNCH, "--python", str(bare), "--", script], nodes=[1])
    one.start_command([*LAUNCH, "--", script], nodes=[0])
    assert one.wait(1) == 2, one.story()
    assert f"the interpreter {bare} has no torch" in one.err(1)
    assert one.wait(0) == 1
    assert one.causes() == ["peer-lost", "program-error"]


def test_an_interpreter_that_is_not_there(gang: MakeGang) -> None:
    one = gang(nodes=1)
    one.start_command([*LAUNCH, "--python", "/no/python", "--", str(HERE / "gang_scripts" / "trainer.py")])
    assert one.codes() == [2]
    assert "/no/python does not run" in one.err(0)


def test_a_run_directory_that_a_node_cannot_see(gang: MakeGang, tmp_path: Path) -> None:
    one = gang(nodes=2)
    elsewhere = tmp_path / "local-disk"
    one.start("trainer.py", nodes=[1], PCTOOL_RUN_DIR=str(elsewhere))
    one.start("trainer.py", nodes=[0])
    assert one.wait(1) == 2, one.story()
    assert f"node n1 cannot see {elsewhere}" in one.err(1)
    assert one.wait(0) == 1
    record = one.records()["n1"]  # written by node 0: node 1 could not
    assert (record.cause, record.code) == ("program-error", 2)
    assert "n1" in record.why


def test_a_new_node_without_the_run_directory_does_not_end_a_job_that_has_started_before(
    gang: MakeGang, tmp_path: Path
) -> None:
    one = gang(nodes=2, number=5)
    Ledger(one.run.ledger).append("started", attempt=4, nodes=["n0", "n1"], seconds=1.0)
    one.start("trainer.py", nodes=[1], PCTOOL_RUN_DIR=str(tmp_path / "not-mounted"))
    one.start("trainer.py", nodes=[0])
    assert one.wait(1) == 2, one.story()
    assert one.wait(0) == 1
    record = one.records()["n1"]
    assert (record.cause, record.code) == ("peer-lost", 1)
    assert "cannot see" in record.why


@pytest.mark.parametrize(
    ("log", "why"),
    [("rank-1.log", "rank 1 cannot open its log"), ("torchrun-1.log", "cannot start torchrun")],
)
def test_a_log_that_cannot_be_opened_is_no_error_of_the_program(gang: MakeGang, log: str, why: str) -> None:
    """A folder in the log's place stands for a quota, a stale mount, or an error of the disk."""
    one = gang(nodes=2)
    (one.run.logs(0) / log).mkdir(parents=True)
    one.start("trainer.py", "steps=1000")
    one.codes()
    record = one.records()["n1"]
    assert record.cause == "peer-lost", one.story()
    assert why in record.why


def test_a_hub_without_a_free_port_has_the_job_requeued(gang: MakeGang) -> None:
    one = gang(nodes=2)
    first = int(one.hub.rpartition(":")[2])
    with ExitStack() as stack:
        for port in range(first, min(first + PORTS, 65536)):
            with suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        one.start_command([*LAUNCH, "--", str(HERE / "gang_scripts" / "trainer.py")], nodes=[0])
        assert one.wait(0) != 0
    assert one.records()["n0"].cause == "peer-lost"
    assert "all taken" in one.err(0)
    assert "Traceback" not in one.err(0)


def test_a_run_directory_of_another_attempt(gang: MakeGang) -> None:
    one = gang(nodes=1)
    one.start("trainer.py", PCTOOL_NONCE="other")
    assert one.codes() == [2]
    assert "another attempt's claim" in one.err(0)


def test_a_hub_address_that_is_not_ours(gang: MakeGang) -> None:
    one = gang(nodes=2)
    one.start_command([*LAUNCH, "--", "train.py"], nodes=[0], PCTOOL_HUB="192.0.2.1:4000")
    assert one.codes() == [2]
    assert "cannot listen on 192.0.2.1" in one.err(0)
    assert one.records()["n0"].code == 2


def test_a_run_directory_that_goes_away_does_not_hang_the_launch(gang: MakeGang) -> None:
    one = gang(nodes=1)
    one.start("trainer.py")
    one.stepping()
    shutil.rmtree(one.run.path)
    one.until(lambda: "run directory:" in one.err(0), "a complaint of the heartbeat")
    one.processes[0].send_signal(signal.SIGUSR1)
    assert one.codes() == [0], one.story()
    assert one.causes() == ["stop"]  # its folder is made anew: decide finds it, should the file system have come back
