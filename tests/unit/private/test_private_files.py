"""slurm.conf of a private cluster as text: ParallelCluster's settings, a config's own, time scaled in order."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pctool.slurm.private import conf, settings
from pctool.spec.cluster import ClusterView, ComputeResourceView, QueueView


def _view(*pairs: tuple[str, str], low: int = 1, high: int = 3) -> ClusterView:
    cr = ComputeResourceView(
        name="r",
        queue="q",
        instance_types=("p5.48xlarge",),
        min_count=low,
        max_count=high,
        cpus=192,
        real_memory_mib=1992294,
        gpu_type="h100",
        gpus=8,
    )
    queue = QueueView(name="q", capacity_type="SPOT", compute_resources=(cr,), default=True)
    return ClusterView(source="x", queues=(queue,), slurm_settings=pairs)


def _layout(scale: float = 1.0, **changes: object) -> conf.Layout:
    ports = [17000, 17001, 17003, 17009]
    words = {"folder": Path("/tmp/pct-x"), "host": "here", "user": "me", "ports": ports, "version": (22, 5)}
    return conf.Layout(**{**words, "time_scale": scale, **changes})  # type: ignore[arg-type]


def _settings(view: ClusterView, layout: conf.Layout) -> dict[str, str]:
    text, _ = conf.slurm_conf(view, layout)
    lines = [line for line in text.splitlines() if not line.startswith(("NodeName", "NodeSet", "Partition"))]
    return {key: value for key, _, value in (line.partition("=") for line in lines if line)}


def test_parallelcluster_s_settings_are_there() -> None:
    found = _settings(_view(), _layout())
    assert (found["SlurmdTimeout"], found["KillWait"], found["JobFileAppend"], found["JobRequeue"]) == (
        "180",
        "30",
        "0",
        "1",
    )
    assert (found["MessageTimeout"], found["ResumeTimeout"], found["SuspendTime"]) == ("60", "2100", "600")
    assert found["AuthInfo"] == "socket=/tmp/pct-x/munge/munge.sock,cred_expire=70"
    assert found["SlurmctldParameters"] == "idle_on_node_suspend,power_save_interval=10,power_save_min_interval=30"
    assert found["SuspendExcNodes"] == "q-st-r-1"
    assert "AccountingStorageType" not in found


def test_nodes_get_a_port_each() -> None:
    text, _ = conf.slurm_conf(_view(), _layout())
    nodes = [line for line in text.splitlines() if line.startswith("NodeName")]
    assert nodes[0].startswith("NodeName=q-st-r-[1-1] CPUs=192 RealMemory=1992294 State=CLOUD Feature=static Weight=1 ")
    assert nodes[0].endswith("Gres=gpu:h100:8 NodeHostName=here NodeAddr=127.0.0.1 Port=[17001]")
    assert nodes[1].endswith("Port=[17003,17009]")


def test_the_config_s_last_word_wins_whatever_its_case() -> None:
    view = _view(("killwait", "40"), ("KILLWAIT", "50"), ("RequeueExit", "85"))
    text, _ = conf.slurm_conf(view, _layout())
    assert [line for line in text.splitlines() if line.lower().startswith("killwait")] == ["KillWait=50"]
    assert "\nRequeueExit=85\n" in text


def test_what_cannot_be_mirrored_is_said() -> None:
    view = _view(("Prolog", "/opt/p.sh"), ("JobCompType", "jobcomp/lua"), ("SlurmdTimeout", "300"))
    text, left = conf.slurm_conf(view, _layout())
    assert set(left) == {"Prolog", "JobCompType"}
    assert "/opt/p.sh" not in text
    assert "SlurmdTimeout=300" in text


def test_own_settings_win_and_are_not_scaled() -> None:
    found = _settings(_view(("KillWait", "40")), _layout(0.1, extra={"KillWait": "7", "SuspendTime": "-1"}))
    assert (found["KillWait"], found["SuspendTime"]) == ("7", "-1")


def test_a_config_s_auth_info_keeps_our_socket() -> None:
    found = _settings(_view(("AuthInfo", "cred_expire=20,ttl=60,socket=/run/munge")), _layout(0.5))
    assert found["AuthInfo"] == "socket=/tmp/pct-x/munge/munge.sock,cred_expire=10,ttl=60"


def test_scaled_times_and_the_scheduler_s_own() -> None:
    found = _settings(_view(("SchedulerParameters", "defer,bf_interval=60")), _layout(0.1))
    assert (found["SlurmdTimeout"], found["KillWait"], found["SuspendTime"]) == ("18", "3", "60")
    assert found["SchedulerParameters"] == "defer,sched_interval=6,bf_interval=6"
    assert found["SlurmctldParameters"].endswith("power_save_interval=1,power_save_min_interval=3")


@given(st.floats(min_value=0.01, max_value=2))
def test_the_order_of_the_times_is_kept(scale: float) -> None:
    found = _settings(_view(), _layout(scale))
    times = [int(found[key]) for key in ("KillWait", "SlurmctldTimeout", "SlurmdTimeout", "SuspendTime")]
    assert times == sorted(times)
    assert times[0] >= 1
    assert int(found["AuthInfo"].rpartition("=")[2]) >= settings.CRED_FLOOR_S


@pytest.mark.parametrize(("seconds", "scale", "expected"), [(30, 0.1, 3), (30, 0.001, 1), (0, 0.1, 0), (-1, 0.1, -1)])
def test_scaled(seconds: int, scale: float, expected: int) -> None:
    assert settings.scaled(seconds, scale) == expected


def test_fewer_nodes_are_static_ones_first() -> None:
    (queue,) = conf.limit_nodes(_view(low=1, high=3), 2).queues
    assert [name for name, _ in queue.compute_resources[0].node_names()] == ["q-st-r-1", "q-dy-r-1"]
    (queue,) = conf.limit_nodes(_view(low=2, high=3), 1).queues
    assert [name for name, _ in queue.compute_resources[0].node_names()] == ["q-st-r-1"]


def test_the_task_prolog_prints_exports_as_they_are(tmp_path: Path) -> None:
    layout = _layout(folder=tmp_path, path_prefix="/opt/x y/bin")
    (tmp_path / "nodes").mkdir()
    layout.node_env("n1").write_text(conf.node_env_text({"A": 'b "c" $d\\n %s', "E": ""}))
    script = tmp_path / "p"
    script.write_bytes(conf.programs(layout, "/bin/true")["task-prolog"])
    for path, tail in (
        ("/usr/bin:/bin", "export PATH=/opt/x y/bin:/usr/bin:/bin\n"),
        ("/opt/x y/bin:/usr/bin:/bin", ""),
    ):
        env = {"PATH": path, "SLURMD_NODENAME": "n1"}
        done = subprocess.run(["/bin/sh", str(script)], env=env, capture_output=True, text=True, check=True)
        assert done.stdout == 'export A=b "c" $d\\n %s\nexport E=\n' + tail


def test_power_programs_write_one_line(tmp_path: Path) -> None:
    layout = _layout(folder=tmp_path)
    layout.power.parent.mkdir()
    os.mkfifo(layout.power)
    pipe = os.open(layout.power, os.O_RDWR)
    script = tmp_path / "resume"
    script.write_bytes(conf.programs(layout, "/bin/true")["resume"])
    subprocess.run(["/bin/sh", str(script), "q-dy-r-[1-2],q-st-r-1"], check=True)
    assert os.read(pipe, 4096) == b"resume q-dy-r-[1-2],q-st-r-1\n"
    os.close(pipe)
