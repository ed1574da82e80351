"""Losses and failures: what each launch records, and that nobody hangs."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable

import pytest
from gang_harness import Gang

from pctool.node.procs import children

MakeGang = Callable[..., Gang]


def kill_node(one: Gang, node: int) -> None:
    """Kill a node as its loss does: launch, torchrun and ranks at once, without a word."""
    one.processes[node].kill()


def test_a_killed_peer_is_lost_and_hanging_ranks_are_ended(gang: MakeGang) -> None:
    one = gang(nodes=3, timing={"grace_s": 0.5, "kill_s": 0.5})
    one.start("trainer.py")
    one.stepping()
    kill_node(one, 1)
    assert (one.wait(0), one.wait(2)) == (1, 1), one.story()
    assert one.causes() == ["peer-lost", "none", "peer-lost"]
    assert one.ledger("peer-lost")[0].fields["node"] == "n1"
    assert "n1 is lost" in one.records()["n2"].why


def test_the_ranks_die_with_their_launch(gang: MakeGang) -> None:
    one = gang(nodes=2, per_node=2, timing={"grace_s": 0.2, "kill_s": 0.2})
    one.start("trainer.py")
    one.stepping()
    torchrun = one.start_record(1)["torchrun_pid"]
    ranks = children(torchrun)
    assert len(ranks) == 2
    kill_node(one, 1)
    for pid in [torchrun, *ranks]:
        one.until(lambda pid=pid: gone(pid), f"the end of {pid}")  # type: ignore[misc]


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] in {"Z", "X"}
    except FileNotFoundError:
        return True


def test_a_killed_hub_is_known_to_all(gang: MakeGang) -> None:
    one = gang(nodes=3, timing={"grace_s": 0.5, "kill_s": 0.5})
    one.start("trainer.py")
    one.stepping()
    kill_node(one, 0)
    assert (one.wait(1), one.wait(2)) == (1, 1), one.story()
    assert one.causes() == ["none", "peer-lost", "peer-lost"]
    assert "node 0 is lost" in one.records()["n1"].why


def test_a_loss_while_node_0_commits_leaves_it_time(gang: MakeGang) -> None:
    one = gang(nodes=2, timing={"grace_s": 0.3, "save_grace_s": 30, "kill_s": 0.5})
    one.start("trainer.py", "save=2")
    one.stepping()
    page = one.page(0)
    one.notice(1)
    one.until(lambda: page.saving_since > 0, "a save")
    kill_node(one, 1)
    assert one.wait(0) == 0, one.story()
    assert page.committed >= 0
    assert one.records()["n0"].cause == "stop"
    assert one.records()["n0"].saved
    page.close()


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_program_error_keeps_its_own_code(gang: MakeGang, where: int) -> None:
    one = gang(nodes=3, timing={"grace_s": 0.5, "kill_s": 0.5})
    one.start("trainer.py", f"fail={where}:41")
    codes = one.codes()
    assert codes[where] == 41, one.story()
    assert [code for node, code in enumerate(codes) if node != where] == [1, 1]
    assert one.causes()[where] == "program-error"
    assert one.causes().count("peer-lost") == 2
    others = [record for record in one.records().values() if record.cause == "peer-lost"]
    assert all(f"program-error on n{where}" in record.why for record in others)


def test_an_exception_is_named(gang: MakeGang) -> None:
    one = gang(nodes=2, per_node=2, timing={"grace_s": 0.5, "kill_s": 0.5})
    one.start("trainer.py", "fail=3:raise")
    assert one.codes() == [1, 1], one.story()
    assert one.records()["n1"].cause == "program-error"
    assert one.records()["n1"].why == "rank 3: ValueError: sample 17 is broken"


def test_a_rank_killed_by_a_signal_is_recorded_as_that(gang: MakeGang) -> None:
    one = gang(nodes=2, timing={"grace_s": 0.5, "kill_s": 0.5})
    one.start("trainer.py", "fail=1:SIGKILL")
    assert one.codes() == [1, 137], one.story()
    assert one.records()["n1"].cause == "signal"
    assert "SIGKILL (out of memory?)" in one.records()["n1"].why


def test_a_communication_error_is_a_loss_elsewhere(gang: MakeGang) -> None:
    one = gang(nodes=2, timing={"grace_s": 0.5, "kill_s": 0.5})
    one.start("trainer.py", "fail=0:comm")
    assert one.codes() == [1, 1], one.story()
    assert one.causes() == ["peer-lost", "peer-lost"]


def test_sigterm_ends_the_ranks_at_once_and_is_recorded(gang: MakeGang) -> None:
    one = gang(nodes=2)
    one.start("trainer.py")
    one.stepping()
    for process in one.processes.values():  # scancel: every task of the step
        process.send_signal(signal.SIGTERM)
    assert one.codes() in ([143, 143], [143, 1], [1, 143]), one.story()
    assert "signal" in one.causes()
    assert "stop-requested" not in one.story()


def test_a_sigterm_after_a_known_loss_stays_a_loss(gang: MakeGang) -> None:
    one = gang(nodes=3, timing={"grace_s": 60, "kill_s": 0.5})
    one.start("trainer.py")
    one.stepping()
    kill_node(one, 2)
    one.until(lambda: one.ledger("peer-lost"), "the loss")
    time.sleep(0.3)  # until it is known on node 1 too; the grace is far longer
    one.processes[1].send_signal(signal.SIGTERM)
    assert one.wait(1) == 1
    assert one.records()["n1"].cause == "peer-lost"


def test_a_launch_that_dies_before_the_start_is_lost(gang: MakeGang) -> None:
    one = gang(nodes=3, timing={"gather_s": 60, "rejoin_s": 0.5}, poll_s=60)
    one.imds.fault("n1", "hang")  # so it is connected well before its first look is over and it is ready
    one.start("trainer.py", nodes=[0, 1])
    one.until(lambda: connected(one), "launch 1 connected")
    kill_node(one, 1)
    assert one.wait(0) == 1, one.story()
    assert one.causes()[0] == "peer-lost"
    assert "left before the start" in one.records()["n0"].why


def connected(one: Gang) -> bool:
    """Return whether any connection to the hub is established, by the kernel's table."""
    port = int(one.hub.rpartition(":")[2])
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows[1:])


def test_a_gang_that_never_gathers_ends(gang: MakeGang) -> None:
    one = gang(nodes=3, timing={"gather_s": 2})
    one.start("trainer.py", nodes=[0, 1])
    assert one.codes() == [1, 1], one.story()
    assert one.causes() == ["peer-lost", "peer-lost", "none"]
    assert one.ledger("peer-lost")[0].fields["node"] == "node 2"


def test_a_taken_rendezvous_port_is_tried_anew_by_all(gang: MakeGang) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()[1]
        other.close()
        one = gang(nodes=3, ports=[taken.getsockname()[1], free])
        one.start("trainer.py", "steps=20")
        assert one.codes() == [0, 0, 0], one.story()
        assert one.causes() == ["done"] * 3
        assert "try 2" in one.err(0)


def test_a_stranger_cannot_stop_the_gang(gang: MakeGang) -> None:
    one = gang(nodes=2)
    one.start("trainer.py", "steps=150")
    one.stepping()
    host, port = one.hub.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock, sock.makefile("rb") as stream:
        stream.readline()
        sock.sendall(b'{"node":1,"challenge":"x","proof":"x"}\n{"type":"notice","time":1}\n')
        assert stream.readline() == b""
    assert one.codes() == [0, 0], one.story()
    assert one.causes() == ["done", "done"]


def test_stopping_a_launch_process_is_noticed_by_its_silence_only_after_the_limit(gang: MakeGang) -> None:
    """A short pause (a swapped node, a debugger) must not cost the gang its attempt."""
    one = gang(nodes=2)
    one.start("trainer.py", "steps=300")
    one.stepping()
    os.kill(one.processes[1].pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(one.processes[1].pid, signal.SIGCONT)
    assert one.codes() == [0, 0], one.story()
