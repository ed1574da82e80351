from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from pctool.errors import SlurmError
from pctool.job import lostnodes
from pctool.slurm import query

Make = Callable[..., list[float]]


@pytest.fixture
def slurmd() -> Iterator[int]:
    """Give the port of something that takes connections, as a living slurmd does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Give a cluster of this release whose node's slurmd is at `port`; time passes by sleeping alone."""

    def make(version: tuple[int, int], port: int, timeout: str = "180 sec") -> list[float]:
        now = [0.0]
        node = SimpleNamespace(addr="127.0.0.1", fields={"Port": str(port)})
        monkeypatch.setattr(query, "slurm_version", lambda: version)
        monkeypatch.setattr(query, "config", lambda: {"SlurmdTimeout": timeout, "SlurmdPort": "6818"})
        monkeypatch.setattr(query, "show_node", lambda name: node)
        clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
        monkeypatch.setattr(lostnodes, "time", clock)
        return now

    return make


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_silent_node_is_waited_for_until_slurm_must_have_given_it_up(cluster: Make) -> None:
    now = cluster((22, 5), free_port())
    lostnodes.await_loss(["n1"])
    assert 240 <= now[0] <= 240 + lostnodes.PERIOD_S


def test_a_node_that_answers_is_not_waited_for(cluster: Make, slurmd: int) -> None:
    now = cluster((22, 5), slurmd)
    lostnodes.await_loss(["n1"])
    assert now[0] == 0


def test_a_node_that_answers_again_ends_the_wait(cluster: Make, slurmd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = cluster((22, 5), slurmd)
    looks = iter([False, False, True])
    monkeypatch.setattr(lostnodes, "answers", lambda name, settings: next(looks))
    lostnodes.await_loss(["n1"])
    assert now[0] == 2 * lostnodes.PERIOD_S


@pytest.mark.parametrize(
    ("version", "timeout", "nodes"),
    [((24, 11), "180 sec", ["n1"]), ((22, 5), "0 sec", ["n1"]), ((22, 5), "180 sec", [])],
)
def test_no_wait_where_it_is_not_needed(
    cluster: Make, version: tuple[int, int], timeout: str, nodes: list[str]
) -> None:
    now = cluster(version, free_port(), timeout)
    lostnodes.await_loss(nodes)
    assert now[0] == 0


def test_a_slurm_that_does_not_answer_is_said_and_not_waited_for(
    cluster: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = cluster((22, 5), free_port())

    def fail() -> dict[str, str]:
        raise SlurmError("no answer")

    monkeypatch.setattr(query, "config", fail)
    monkeypatch.setattr(query, "patiently", lambda call: call())
    lostnodes.await_loss(["n1"])
    assert now[0] == 0
    assert "no answer" in capsys.readouterr().err


def test_a_slurm_that_is_silent_for_a_while_does_not_end_the_wait(
    cluster: Make, slurmd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = cluster((22, 5), slurmd)

    def look(name: str, settings: object) -> bool:
        if now[0] < 100:
            raise SlurmError("Unable to contact slurm controller (connect failure)")
        return now[0] >= 150

    monkeypatch.setattr(lostnodes, "answers", look)
    lostnodes.await_loss(["n1"])
    assert now[0] == 150
