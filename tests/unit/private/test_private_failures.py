"""What a private cluster does when one of its parts fails: no answer, a Slurm command that fails, a killed start."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pctool.cli.main import main
from pctool.errors import SlurmError, UsageError
from pctool.slurm.private import client, proc, registry
from pctool.slurm.private.client import PrivateCluster
from pctool.slurm.private.control import Control
from pctool.slurm.private.fleet import Fleet
from pctool.slurm.private.supervisor import Supervisor

KILLED_START = """
import os, signal
from pctool.slurm.private import registry
with registry.claim("x"):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the folder of a cluster whose supervisor takes requests and never answers."""
    monkeypatch.setattr(client, "_ANSWER_S", 0.2)
    monkeypatch.chdir(tmp_path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    Path("c").mkdir()
    listener.bind("c/control")
    listener.listen()
    monkeypatch.setattr(client, "_wait_until_gone", lambda folder: None)
    with listener:
        yield Path("c")


def _cluster(folder: Path, keeper: subprocess.Popen[bytes] | None) -> PrivateCluster:
    facts = {"folder": str(folder), "nodes": [], "slurm_version": "", "time_scale": 1.0, "not_mirrored": {}}
    return PrivateCluster(facts, keeper)


def test_a_silent_supervisor_does_not_keep_the_keeper(silent: Path) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as keeper:  # ends with its pipe
        try:
            _cluster(silent, keeper).down()
            assert keeper.poll() == 0
        finally:
            keeper.kill()


def test_a_silent_supervisor_without_a_keeper_of_ours_is_an_error(silent: Path) -> None:
    with pytest.raises(SlurmError, match=r"gave no answer in 0\.2 s"):
        _cluster(silent, None).down()


def test_a_power_request_that_fails_costs_no_other() -> None:
    done = []

    def expand(nodes: str) -> list[str]:
        if nodes == "a":
            raise SlurmError("`scontrol show hostnames a` gave no answer in 20 s")
        return [nodes]

    reader, writer = os.pipe()
    supervisor = Supervisor.__new__(Supervisor)  # without daemons and their files
    supervisor._power_pipe, supervisor._power_text = reader, b""
    supervisor.daemons = cast("Any", SimpleNamespace(expand=expand))
    supervisor.fleet = cast("Any", SimpleNamespace(power=lambda verb, names: done.append((verb, names))))
    try:
        os.write(writer, b"resume a\nresume b\nsuspend c\nresu")
        supervisor._power_asked()
        os.write(writer, b"me d\n")
        supervisor._power_asked()
    finally:
        os.close(reader)
        os.close(writer)
    assert done == [("resume", ["b"]), ("suspend", ["c"]), ("resume", ["d"])]


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (OSError(28, "No space left on device"), 3, "'env' failed: [Errno 28] No space left on device"),
        (SlurmError("no answer"), 3, "no answer"),
        (KeyError("x"), 2, "bad request"),
    ],
)
def test_a_failed_operation_is_answered(failure: Exception, code: int, message: str, tmp_path: Path) -> None:
    def set_env(node: str, env: dict[str, str]) -> None:
        raise failure

    with selectors.DefaultSelector() as selector:
        control = Control(cast("Fleet", SimpleNamespace(set_env=set_env)), selector, lambda: None)
        control.listen(tmp_path / "control")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(tmp_path / "control"))
            connection.sendall(b'{"op": "env", "node": "n", "env": {}}\n')
            for _ in range(2):  # accept, read
                for key, _ in selector.select(5):
                    cast("Callable[[], None]", key.data)()
            connection.settimeout(5)
            answer = json.loads(connection.makefile("rb").readline())
        for key in list(selector.get_map().values()):
            cast("socket.socket", key.fileobj).close()
    assert (answer["ok"], answer["code"]) == (False, code)
    assert message in answer["error"]


@pytest.fixture
def killed_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the entry that a start which was killed has left."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", KILLED_START], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    entry = registry.state_folder() / "x.json"
    assert entry.exists()
    return entry


def test_up_takes_over_the_name_of_a_killed_start(killed_start: Path) -> None:
    with registry.claim("x") as entry:
        assert entry == killed_start


def test_down_forgets_a_killed_start(killed_start: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["local", "down", "--name", "x"]) == 0
    assert "forgot x, whose start was killed" in capsys.readouterr().err
    assert not killed_start.exists()
    assert main(["local", "down", "--name", "x"]) == 4


def test_down_of_all_forgets_a_killed_start(killed_start: Path) -> None:
    assert main(["local", "down", "--all"]) == 0
    assert not killed_start.exists()


def test_a_start_that_runs_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with registry.claim("x") as entry:
        assert registry.names() == []
        with pytest.raises(UsageError, match=f"process {os.getpid()} is starting"), registry.claim("x"):
            pass
        assert main(["local", "down", "--name", "x"]) == 4
        assert f"process {os.getpid()} is starting it" in capsys.readouterr().err
        assert entry.exists()


def test_a_reused_pid_is_not_the_starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with registry.claim("x") as entry:
        starter = json.loads(entry.read_text())["starter"]
        starter["started"] -= 1
        entry.write_text(json.dumps({"starter": starter}))
        with registry.claim("x"):
            pass


@pytest.mark.parametrize("text", ["", "{", '{"starter": 1}', '{"folder": "/none"}'])
def test_an_entry_that_names_nothing_is_taken_over(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    registry.state_folder().mkdir(parents=True)
    (registry.state_folder() / "x.json").write_text(text)
    with registry.claim("x"):
        pass


def test_when_a_process_started() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            started = proc.started(child.pid)
            assert started is not None
            assert started >= (proc.started(os.getpid()) or 0)
        finally:
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert proc.started(child.pid) is None  # a zombie does nothing any more
    assert proc.started(child.pid) is None
