from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest

from pctool.errors import SlurmError
from pctool.job import lostnodes
from pctool.slurm import query

Clock = Callable[[], float]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """Give a cluster of this release whose node shows these states, one a look; time passes by sleeping alone."""

    def make(version: tuple[int, int], states: Iterable[frozenset[str]], timeout: str = "180 sec") -> list[float]:
        now, shown = [0.0], iter(states)
        monkeypatch.setattr(query, "slurm_version", lambda: version)
        monkeypatch.setattr(query, "config", lambda: {"SlurmdTimeout": timeout})
        monkeypatch.setattr(query, "show_node", lambda name: SimpleNamespace(states=next(shown)))
        clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
        monkeypatch.setattr(lostnodes, "time", clock)
        return now

    return make


ALIVE, SILENT = frozenset({"ALLOCATED"}), frozenset({"ALLOCATED", "NOT_RESPONDING"})


def test_a_node_that_answers_is_waited_for_until_a_ping_would_have_shown_it(
    cluster: Callable[..., list[float]],
) -> None:
    now = cluster((22, 5), iter(lambda: ALIVE, None))
    lostnodes.await_loss(["n1"])
    assert 90 < now[0] <= 90 + lostnodes.PERIOD_S


def test_a_silent_node_is_waited_for_until_slurm_must_have_given_it_up(cluster: Callable[..., list[float]]) -> None:
    now = cluster((22, 5), iter(lambda: SILENT, None))
    lostnodes.await_loss(["n1"])
    assert 240 <= now[0] <= 240 + lostnodes.PERIOD_S


@pytest.mark.parametrize(
    ("version", "timeout", "nodes"),
    [((24, 11), "180 sec", ["n1"]), ((22, 5), "0 sec", ["n1"]), ((22, 5), "180 sec", [])],
)
def test_no_wait_where_it_is_not_needed(
    cluster: Callable[..., list[float]], version: tuple[int, int], timeout: str, nodes: list[str]
) -> None:
    now = cluster(version, [], timeout)
    lostnodes.await_loss(nodes)
    assert now[0] == 0


def test_a_silent_slurm_is_said_and_not_waited_for(
    cluster: Callable[..., list[float]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = cluster((22, 5), [])

    def fail() -> dict[str, str]:
        raise SlurmError("no answer")

    monkeypatch.setattr(query, "config", fail)
    lostnodes.await_loss(["n1"])
    assert now[0] == 0
    assert "no answer" in capsys.readouterr().err
