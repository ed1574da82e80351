"""A stop: from one node's notice, a stop file or a signal to every rank's page, and out together."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

from gang_harness import Gang

from pctool.run.ledger import Ledger
from pctool.run.stop import StopRequest, write_stop

MakeGang = Callable[..., Gang]


def test_a_notice_on_one_of_four_nodes_reaches_every_page(gang: MakeGang) -> None:
    one = gang(nodes=4)
    one.start("trainer.py", "save=0.3")
    one.stepping()
    pages = [one.page(node) for node in range(4)]
    one.notice(2, seconds=100)
    for page in pages:
        one.until(lambda page=page: page.stop_requested, "a stop on every page")  # type: ignore[misc]
    assert {page.reason for page in pages} == {"notice"}
    assert len({page.deadline for page in pages}) == 1
    assert abs(pages[0].deadline - time.time() - 100) < 30
    assert one.codes() == [0] * 4, one.story()
    assert one.causes() == ["stop"] * 4
    assert all(record.saved and record.why == "notice" for record in one.records().values())
    events = [event.event for event in Ledger(one.run.ledger).read()]
    order = [events.index(name) for name in ("started", "stop-requested", "stop-armed", "node-exit")]
    assert order == sorted(order)
    assert one.ledger("notice")[0].fields["node"] == "n2"
    assert one.ledger("stop-requested")[0].fields["why"] == "notice"
    for page in pages:
        page.close()


def test_no_launch_ends_before_the_commit(gang: MakeGang) -> None:
    """Node 1's ranks end at once, node 0 takes two seconds more to commit; srun would count from the first exit."""
    one = gang(nodes=2)
    one.start("trainer.py", "save=2")
    one.stepping()
    page = one.page(0)
    one.notice(1)
    one.until(lambda: page.saving_since > 0, "a save on node 0")
    assert page.committed == -1
    one.until(lambda: one.processes[1].poll() is not None, "the end of launch 1")
    committed = one.ledger("node-exit")
    assert {event.fields["node"] for event in committed} == {"n0", "n1"}, "launch 1 ended before node 0 had committed"
    assert one.codes() == [0, 0]
    assert "step" in one.err(0)
    assert "is committed" in one.err(0)
    page.close()


def test_a_stop_file_stops_the_gang(gang: MakeGang) -> None:
    one = gang(nodes=2)
    one.start("trainer.py")
    one.stepping()
    write_stop(one.attempt, StopRequest(why="user", who="ada", requeue=False))
    assert one.codes() == [0, 0], one.story()
    assert one.causes() == ["stop", "stop"]
    assert one.records()["n1"].why == "user"


def test_usr1_to_a_launch_stops_the_gang(gang: MakeGang) -> None:
    """Slurm sends it to launch where a script says --signal=USR1@300 without B:, and torchrun must survive it."""
    one = gang(nodes=2)
    one.start("trainer.py")
    one.stepping()
    one.processes[1].send_signal(signal.SIGUSR1)
    os.kill(one.start_record(1)["torchrun_pid"], signal.SIGUSR1)
    assert one.codes() == [0, 0], one.story()
    assert one.causes() == ["stop", "stop"]
    assert one.records()["n0"].why == "time-limit"


def test_usr1_before_the_time_limit_ends_the_mirror_before_slurm_ends_the_job(gang: MakeGang, tmp_path: Path) -> None:
    """The signal brings no deadline, so node 0 asks Slurm, by the task's own id in an array."""
    end = datetime.now() + timedelta(seconds=20)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\n'
        f"echo JobId=7 UserId=ada JobState=RUNNING EndTime={end:%Y-%m-%dT%H:%M:%S}\n"
    )
    scontrol.chmod(0o755)
    one = gang(nodes=2)
    one.start(
        "trainer.py",
        "save=3",
        PATH=f"{scontrol.parent}:{os.environ['PATH']}",
        SLURM_ARRAY_JOB_ID="6",
        SLURM_ARRAY_TASK_ID="3",
    )
    one.stepping()
    page = one.page(1)
    one.processes[0].send_signal(signal.SIGUSR1)
    one.until(lambda: page.deadline, "the end of the job on node 1's page")
    assert abs(page.deadline - end.timestamp()) < 1.5
    page.close()
    assert one.codes() == [0, 0], one.story()
    assert (tmp_path / "asked").read_text() == "show job 6_3\n"


def test_two_notices_keep_the_earlier_deadline(gang: MakeGang) -> None:
    one = gang(nodes=3)
    one.start("trainer.py", "save=1")
    one.stepping()
    page = one.page(0)
    one.notice(1, seconds=120)
    one.until(lambda: page.stop_requested, "the stop")
    first = page.deadline
    one.notice(2, seconds=60)
    one.until(lambda: page.deadline != first, "the earlier deadline")
    assert page.deadline < first
    assert one.codes() == [0, 0, 0], one.story()
    assert len(one.ledger("stop-requested")) == 1
    assert len(one.ledger("notice")) == 2
    page.close()


def test_a_standing_notice_makes_the_gang_step_back_before_torchrun(gang: MakeGang) -> None:
    one = gang(nodes=3)
    one.notice(1)
    one.start("trainer.py")
    assert one.codes() == [0, 0, 0], one.story()
    assert one.causes() == ["stop"] * 3
    assert all(record.why.startswith("standing-notice") and not record.saved for record in one.records().values())
    assert one.ledger("step-back")[0].fields["node"] == "n1"
    assert not one.ledger("started")
    assert not (one.run.logs(0) / "rank-0.log").exists()


def test_a_script_that_cannot_be_changed_gets_the_stop_as_a_signal(gang: MakeGang) -> None:
    one = gang(nodes=2, per_node=2, stop_signal="USR2")
    one.start("stubborn.py")
    logs = one.run.logs(0)
    one.until(lambda: all((logs / f"torchrun-{node}.log").exists() for node in range(2)), "torchrun on both nodes")
    one.notice(0)  # most likely before the ranks have a handler: the signal waits for it
    assert one.codes() == [0, 0], one.story()
    assert one.causes() == ["stop", "stop"]
    assert all(record.saved for record in one.records().values())
    for rank in range(4):
        assert "saved on SIGUSR2" in _text(logs / f"rank-{rank}.log")
        assert "worker survived" in _text(logs / f"rank-{rank}.log")


def test_a_stop_that_is_not_followed_ends_after_the_deadline(gang: MakeGang) -> None:
    one = gang(nodes=2, timing={"overdue_s": 0.5, "kill_s": 0.5})
    one.start("trainer.py", "fail=1:hang")
    one.stepping()
    page = one.page(1)
    one.until(lambda: page.step >= 5, "rank 1 hangs")
    page.close()
    one.notice(0, seconds=2)
    assert one.codes() == [0, 0], one.story()
    assert one.causes() == ["stop", "stop"]
    assert not one.records()["n1"].saved


def test_rebalance_is_only_written_down(gang: MakeGang) -> None:
    one = gang(nodes=2)
    one.start("trainer.py", "steps=200")
    one.stepping()
    one.imds.rebalance("n1")
    assert one.codes() == [0, 0], one.story()
    assert one.causes() == ["done", "done"]
    assert one.ledger("rebalance")[0].fields["node"] == "n1"


def test_instance_metadata_that_fails_does_not_stop_training(gang: MakeGang) -> None:
    one = gang(nodes=4)
    one.imds.fault("n0", "500")
    one.imds.fault("n1", "hang")
    one.imds.fault("n2", "refuse-token")
    gone = one.imds.endpoint("n3")
    one.start("trainer.py", "steps=50", nodes=[0, 1, 2])
    one.imds.remove("n3")
    one.imds.add("n3", instance_id="i", instance_type="t", availability_zone="us-east-1a")  # elsewhere
    one.start("trainer.py", "steps=50", nodes=[3], AWS_EC2_METADATA_SERVICE_ENDPOINT=gone)
    assert one.codes() == [0] * 4, one.story()
    assert one.causes() == ["done"] * 4
    said = ["gives no token (500)", "gave no answer", "gives no token (403)", "cannot be reached"]
    for node, text in enumerate(said):
        assert one.err(node).count("instance metadata:") == 1, one.err(node)
        assert text in one.err(node)


def test_the_heartbeat_tells_the_step(gang: MakeGang) -> None:
    one = gang(nodes=2)
    one.start("trainer.py")
    one.stepping()
    write_stop(one.attempt, StopRequest(why="user"))
    one.codes()
    beat = json.loads(one.attempt.heartbeat.read_text())
    assert beat["step"] >= 3
    assert beat["committed"] >= 3
    assert beat["nodes"] == 2
    assert abs(beat["time"] - time.time()) < 60


def _text(path: object) -> str:
    try:
        with open(str(path)) as file:
            return file.read()
    except FileNotFoundError:
        return ""
