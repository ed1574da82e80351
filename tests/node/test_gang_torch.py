"""The real torchrun and gloo: what torch reports is what launch records."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from gang_harness import Gang

MakeGang = Callable[..., Gang]

pytestmark = pytest.mark.torch

# A rank that ends without destroying its process group may abort in teardown, which hides its own exit code.
ABORTED = 134


def start(one: Gang, *script: str) -> None:
    one.options["module"] = "torch.distributed.run"
    one.start("reduce.py", *script)


def reducing(one: Gang, ranks: int) -> None:
    for rank in range(ranks):
        log = one.run.logs(0) / f"rank-{rank}.log"
        one.until(lambda log=log: log.exists() and "reduced" in log.read_text(), f"rank {rank} in its loop")  # type: ignore[misc]


def test_two_nodes_of_two_ranks_run_to_the_end(gang: MakeGang) -> None:
    one = gang(nodes=2, per_node=2)
    start(one, "20", "--s", "--log", "0.4")  # prefixes of torchrun's own flags
    assert one.codes() == [0, 0], one.story()
    assert one.causes() == ["done", "done"]
    assert one.out(0).count("reduced") == 1
    assert "rank 0 of 4" in one.out(0)  # static rendezvous: node 0 has rank 0
    assert "rank 3 of 4" in (one.run.logs(0) / "rank-3.log").read_text()


def test_a_peer_killed_in_the_middle_of_a_collective(gang: MakeGang) -> None:
    one = gang(nodes=2)
    start(one, "100000")
    reducing(one, 2)
    one.processes[1].kill()
    assert one.wait(0) == 1, one.story()
    assert one.causes() == ["peer-lost", "none"]


def test_an_exception_in_one_rank_is_the_programs(gang: MakeGang) -> None:
    one = gang(nodes=2)
    start(one, "100000", "raise")
    assert one.codes() in ([1, 1], [1, ABORTED]), one.story()
    assert one.causes() == ["peer-lost", "program-error"]
    assert one.records()["n1"].why == "rank 1: ValueError: sample 17 is broken"


def test_an_exit_code_survives_torchrun(gang: MakeGang) -> None:
    one = gang(nodes=2)
    start(one, "100000", "exit")
    assert one.wait(1) in (7, ABORTED), one.story()
    assert one.records()["n1"].code == one.processes[1].returncode


def test_torchs_store_on_a_taken_port(gang: MakeGang) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()[1]
        other.close()
        one = gang(nodes=2, ports=[taken.getsockname()[1], free])
        start(one, "5")
        assert one.codes() == [0, 0], one.story()
        assert "the rendezvous port was taken" in one.err(0)
