"""`pctool local` as a process: a cluster that outlives the command, used, disturbed and ended by later ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from private_harness import CONFIG, wait_for

from pctool.slurm.private import PrivateCluster, proc

if TYPE_CHECKING:
    from private_harness import Shell

pytestmark = pytest.mark.slurm

KEEPER = "pctool.slurm.private.keeper"
Local = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    """Run `pctool local` with a state folder of its own; whatever it has started is ended."""
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}

    def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "pctool", "local", *words]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done

    yield run
    run("down", "--all")


def test_up_use_disturb_down(local: Local) -> None:
    up = local("up", "--cluster", str(CONFIG), "-N", "2", "--time-scale", "0.05")
    assert up.stdout.startswith("export SLURM_CONF=/")
    assert "pctool local down" in up.stderr
    status = json.loads(local("status", "--json").stdout)
    assert {node["state"] for node in status["nodes"].values()} == {"up"}
    assert len(local("shell", "--", "srun", "-N2", "hostname").stdout.splitlines()) == 2
    assert local("shell", "--", "sh", "-c", "exit 7", code=7).stdout == ""
    assert "dies at" in local("notice", "p5spot-dy-p5-1", "--lead", "20").stdout
    local("kill", "p5spot-dy-p5-2", "--never-down")
    dead = "p5spot-dy-p5-2 "
    assert [line.split()[2] for line in local("status").stdout.splitlines() if line.startswith(dead)] == ["dead"]
    # dead for a few seconds only, at this time scale: then clustermgtd has seen it, and it is off
    wait_for("the notice's deadline", lambda: node_of(local, "p5spot-dy-p5-1")["state"] in {"dead", "off"})
    local("down")
    assert not Path(status["folder"]).exists()


def node_of(local: Local, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(local("status", "--json").stdout)["nodes"][name]
    return found


def test_several_by_name(local: Local) -> None:
    local("up", "--cluster", str(CONFIG), "-N", "1", "--name", "a")
    local("up", "--cluster", str(CONFIG), "-N", "1", "--name", "b", "--powered-down")
    again = local("up", "--cluster", str(CONFIG), "--name", "a", code=2)
    assert "'a' is up already" in again.stderr
    other = local("status", code=4)
    assert "there is no private cluster 'default'\n  -> name one of those that are up: a, b" in other.stderr
    assert " off " in local("status", "--name", "b").stdout
    local("down", "--name", "a")
    local("status", "--name", "a", code=4)
    local("status", "--name", "b")


def test_a_killed_start_leaves_neither_its_name_nor_a_cluster(local: Local, tmp_path: Path) -> None:
    state = tmp_path / "pctool" / "local"
    argv = [sys.executable, "-m", "pctool", "local", "up", "--cluster", str(CONFIG), "-N", "1"]
    with subprocess.Popen(argv, env={**os.environ, "XDG_STATE_HOME": str(tmp_path)}) as up:
        wait_for("the keeper", lambda: _keepers(up.pid), 60)
        (keeper,) = _keepers(up.pid)
        up.kill()
    assert [entry.name for entry in state.glob("*.json")] == ["default.json"]
    assert "forgot default, whose start was killed" in local("down").stderr
    wait_for("the end of its cluster", lambda: proc.started(keeper) is None, 60)
    local("up", "--cluster", str(CONFIG), "-N", "1")
    local("down")


def _keepers(owner: int) -> list[int]:
    return [pid for pid in proc.descendants(owner, proc.snapshot()) if proc.arguments(pid)[-2:-1] == [KEEPER]]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["up", "--cluster", "none.yaml"], 4, "none.yaml: there is no such cluster config"),
        (["up", "--cluster", str(CONFIG), "-N", "0"], 2, "at least one node"),
        (["up", "--cluster", str(CONFIG), "--time-scale", "0"], 2, "a positive time scale"),
        (["up", "--cluster", str(CONFIG), "--slurm-root", "/proc"], 3, "no usable Slurm in it"),
        (["up", "--cluster", str(CONFIG), "--name", "a/b"], 2, "cannot be the name"),
        (["down"], 4, "there is no private cluster 'default'"),
        (["notice", "x"], 4, "pctool local up"),
    ],
)
def test_what_is_refused(local: Local, words: list[str], code: int, message: str) -> None:
    assert message in local(*words, code=code).stderr


@pytest.mark.root
def test_as_root_another_user_s_job_runs_as_that_user(
    private_cluster: PrivateCluster, shell_for: Callable[[PrivateCluster], Shell]
) -> None:
    shell = shell_for(private_cluster)
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "srun", "-D", "/", "-N2"]
    shown = shell(*words, "sh", "-c", 'id -u; test -n "$AWS_EC2_METADATA_SERVICE_ENDPOINT" && echo found')
    assert sorted(shown.split()) == ["65534", "65534", "found", "found"]
    refused = shell(*words[:4], "scontrol", "update", "NodeName=p5spot-dy-p5-1", "State=DRAIN", "Reason=x", check=False)
    assert refused == ""
    assert "DRAIN" not in shell("scontrol", "show", "node", "p5spot-dy-p5-1")
