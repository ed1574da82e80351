"""What the hub decides, without sockets, processes or time."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pctool.node.actions import Action, Arm, AskLimit, Enter, FinishMirror, RecordFor, Tell, Timing
from pctool.node.gang import MAX_TRIES, Gang, PageView, Times
from pctool.run.ledger import EVENTS
from pctool.run.stop import StopRequest

A = TypeVar("A")
CLOCK = 1_000_000.0


class Clock:
    """A gang of n nodes with a clock turned by hand; collects what it asks for."""

    def __init__(self, nodes: int, **timing: float) -> None:
        self.now = 0.0
        self.ports = iter(range(5000, 6000))
        self.gang = Gang(
            nodes=nodes,
            address="10.0.0.1",
            free_port=lambda: next(self.ports),
            timing=Timing(**timing),
            times=self.times(),
        )
        self.nodes = nodes

    def times(self) -> Times:
        return Times(self.now, CLOCK + self.now)

    def said(self, node: int, type_: str, **fields: Any) -> list[Action]:
        return self.gang.said(node, {"type": type_, "name": f"n{node}", **fields}, self.times())

    def after(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self.gang.tick(self.times())

    def started(self) -> Clock:
        for node in range(self.nodes):
            self.said(node, "ready")
        return self

    def notice(self, node: int, left: float = 120.0) -> list[Action]:
        return self.said(node, "notice", action="terminate", time=CLOCK + self.now + left, seen=CLOCK)

    def ended(self, node: int, cause: str = "done", code: int = 0, **fields: Any) -> list[Action]:
        return self.said(node, "ended", cause=cause, code=code, why="", **fields)


def told(actions: list[Action]) -> list[str]:
    return [action.message["type"] for action in actions if isinstance(action, Tell)]


def message(actions: list[Action], type_: str) -> dict[str, Any]:
    return next(action.message for action in actions if isinstance(action, Tell) and action.message["type"] == type_)


def entered(actions: list[Action]) -> list[str]:
    return [action.event for action in actions if isinstance(action, Enter)]


def of(actions: list[Action], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def test_it_starts_when_the_last_node_is_ready() -> None:
    clock = Clock(3)
    assert told(clock.said(2, "ready")) == []
    assert told(clock.said(0, "ready")) == []
    actions = clock.said(1, "ready")
    assert message(actions, "start") == {"type": "start", "try": 1, "address": "10.0.0.1", "port": 5000}
    assert of(actions, Enter)[0].fields["nodes"] == ["n0", "n1", "n2"]


def test_a_failed_bind_starts_all_anew_on_another_port_but_not_for_ever() -> None:
    clock = Clock(2).started()
    for try_ in range(1, MAX_TRIES):
        actions = clock.said(0, "bind-failed", **{"try": try_})
        assert message(actions, "start")["port"] == 5000 + try_
        assert told(clock.said(0, "bind-failed", **{"try": try_})) == []  # told twice
    assert told(clock.said(0, "bind-failed", **{"try": MAX_TRIES})) == ["failed"]


def test_another_nodes_early_failure_waits_for_node_0s_bind() -> None:
    clock = Clock(2).started()
    assert told(clock.ended(1, "peer-lost", 1, stage="rendezvous")) == []
    assert told(clock.said(0, "bind-failed", **{"try": 1})) == ["start"]
    assert told(clock.after(60)) == []  # forgotten: that try is over
    assert told(clock.ended(1, "peer-lost", 1, stage="rendezvous")) == []
    assert told(clock.after(11)) == ["failed"]


def test_a_stop_is_told_once_and_armed_when_all_have_acknowledged() -> None:
    clock = Clock(3).started()
    actions = clock.notice(1)
    assert told(actions) == ["stop"]
    assert entered(actions) == ["stop-requested", "notice"]
    assert not of(clock.said(0, "armed"), Arm)
    assert not of(clock.said(2, "armed"), Arm)
    actions = clock.said(1, "armed")
    assert len(of(actions, Arm)) == 1
    assert entered(actions) == ["stop-armed"]
    assert not of(clock.said(1, "armed"), Arm)


def test_a_node_that_has_ended_need_not_acknowledge() -> None:
    clock = Clock(2).started()
    clock.ended(1)
    clock.notice(0)
    assert of(clock.said(0, "armed"), Arm)


@pytest.mark.parametrize(("first", "second", "deadline"), [(120, 60, 60), (60, 120, None), (0, 90, 90), (90, 0, None)])
def test_only_an_earlier_deadline_moves_a_stop(first: float, second: float, deadline: float | None) -> None:
    clock = Clock(2).started()
    when = [CLOCK + left if left else 0.0 for left in (first, second)]
    clock.gang.stop_file(StopRequest(why="user", deadline=when[0]), clock.times())
    actions = clock.said(1, "notice", action="terminate", time=when[1])
    if deadline is None:
        assert told(actions) == []
    else:
        assert message(actions, "stop")["deadline"] == CLOCK + deadline
        assert message(actions, "stop")["why"] == "user"


def test_nobody_is_released_before_node_0_has_ended() -> None:
    clock = Clock(3).started()
    clock.notice(1)
    assert told(clock.ended(1, "stop")) == []
    assert told(clock.ended(2, "stop")) == []
    assert told(clock.after(60)) == []
    actions = clock.ended(0, "stop")
    assert of(actions, FinishMirror)
    assert told(actions) == []  # the mirror is not done
    assert told(clock.gang.mirror_finished(clock.times())) == ["release"]
    assert told(clock.after(1)) == []


def test_the_mirror_has_until_just_before_the_deadline() -> None:
    clock = Clock(1).started()
    clock.notice(0, left=100)
    actions = clock.ended(0, "stop")
    assert of(actions, FinishMirror)[0].deadline == CLOCK + 95
    assert told(clock.after(94)) == []
    assert told(clock.after(2)) == ["release"]


def test_without_a_deadline_the_mirror_is_bounded_too() -> None:
    clock = Clock(1).started()
    assert of(clock.ended(0), FinishMirror)[0].deadline == 0.0
    assert told(clock.after(599)) == []
    assert told(clock.after(2)) == ["release"]


def test_a_standing_notice_steps_the_gang_back_when_all_are_there() -> None:
    clock = Clock(3)
    assert told(clock.notice(1)) == []
    clock.said(0, "ready")
    clock.said(1, "ready")
    actions = clock.said(2, "ready")
    assert told(actions) == ["step-back"]
    assert message(actions, "step-back")["why"] == "standing-notice"
    assert entered(actions) == ["step-back"]
    for node in range(3):
        clock.ended(node, "stop")
    assert told(clock.gang.mirror_finished(clock.times())) == ["release"]


def test_a_standing_notice_does_not_wait_long_for_the_rest_and_a_late_one_hears_of_it() -> None:
    clock = Clock(3)
    clock.said(0, "ready")
    clock.notice(1)
    clock.said(1, "ready")
    assert told(clock.after(29)) == []
    assert told(clock.after(2)) == ["step-back"]
    assert told(clock.said(2, "ready")) == ["step-back"]


def test_a_stop_file_before_the_start_steps_back_by_its_own_name() -> None:
    clock = Clock(1)
    clock.gang.stop_file(StopRequest(why="user", who="ada"), clock.times())
    assert message(clock.said(0, "ready"), "step-back")["why"] == "user"


def test_a_lost_node_fails_the_gang_and_ends_hanging_ranks_after_the_grace() -> None:
    clock = Clock(3).started()
    actions = clock.gang.gone(2, "connection closed", clock.times())
    assert told(actions) == ["failed"]
    assert entered(actions) == ["peer-lost"]
    assert told(clock.after(4)) == []
    assert told(clock.after(1.5)) == ["terminate"]
    assert told(clock.after(10)) == []  # once


def test_a_save_on_node_0_gets_more_time_but_not_for_ever() -> None:
    clock = Clock(2).started()
    clock.gang.page(PageView(saving=True), clock.times())
    clock.gang.gone(1, "silent", clock.times())
    assert told(clock.after(9)) == []
    assert told(clock.after(1.5)) == ["terminate"]


def test_what_the_ranks_had_copied_is_written_before_anybody_is_released() -> None:
    clock = Clock(2).started()
    clock.gang.page(PageView(writing=True), clock.times())
    for node in (0, 1):
        clock.ended(node, "program-error", 3)
    assert told(clock.after(60)) == []
    assert of(clock.gang.page(PageView(writing=False), clock.times()), FinishMirror)


def test_writers_that_never_come_to_an_end_are_not_waited_for_for_ever() -> None:
    for cause, seconds in (("program-error", 120), ("lost", 10)):
        clock = Clock(2).started()
        clock.gang.page(PageView(writing=True), clock.times())
        actions = clock.ended(0, "peer-lost" if cause == "lost" else cause, 1)
        actions += clock.gang.gone(1, "silent", clock.times()) if cause == "lost" else clock.ended(1, cause, 1)
        assert not of([*actions, *clock.after(seconds - 1)], FinishMirror)
        assert of(clock.after(2), FinishMirror)


def test_a_deadline_is_not_passed_for_the_writers() -> None:
    clock = Clock(1).started()
    clock.notice(0, left=60)
    clock.gang.page(PageView(writing=True), clock.times())
    clock.ended(0, "stop")
    assert not of(clock.after(54), FinishMirror)
    assert of(clock.after(2), FinishMirror)


def test_when_the_save_is_over_the_grace_is_too() -> None:
    clock = Clock(2).started()
    clock.gang.page(PageView(saving=True), clock.times())
    clock.gang.gone(1, "silent", clock.times())
    clock.after(7)
    assert told(clock.gang.page(PageView(saving=False), clock.times())) == ["terminate"]


def test_a_program_error_is_told_with_its_node_and_the_first_stands() -> None:
    clock = Clock(3).started()
    failed = message(clock.ended(1, "program-error", 3), "failed")
    assert failed["cause"] == "program-error"
    assert "n1" in failed["why"]
    assert told(clock.ended(2, "peer-lost", 1)) == []
    clock.ended(0, "peer-lost", 1)
    assert told(clock.gang.mirror_finished(clock.times())) == ["release"]


def test_a_node_that_ended_well_cannot_be_lost_any_more() -> None:
    clock = Clock(2).started()
    clock.ended(1, "stop")
    assert clock.gang.gone(1, "connection closed", clock.times()) == []


def test_a_launch_that_leaves_before_it_is_ready_may_come_again() -> None:
    clock = Clock(2)
    clock.gang.gone(1, "connection closed", clock.times())
    assert told(clock.after(10)) == []
    clock.gang.joined(1)
    assert told(clock.after(30)) == []
    clock.gang.gone(1, "connection closed", clock.times())
    assert told(clock.after(21)) == ["failed"]


def test_the_gang_does_not_wait_for_ever_for_the_missing() -> None:
    clock = Clock(3)
    clock.said(0, "ready")
    assert told(clock.after(299)) == []
    actions = clock.after(2)
    assert told(actions) == ["failed"]
    assert [event.fields["node"] for event in of(actions, Enter)] == ["node 1", "node 2"]


def test_a_node_that_cannot_write_has_its_record_written_by_node_0() -> None:
    clock = Clock(2)
    clock.said(0, "ready")
    actions = clock.ended(1, "program-error", 2, recorded=False)
    assert of(actions, RecordFor)[0].node == "n1"
    assert of(actions, RecordFor)[0].record.code == 2
    assert told(actions) == ["failed"]


@pytest.mark.parametrize(("started", "cause"), [(False, "program-error"), (True, "peer-lost")])
@pytest.mark.parametrize("early", [False, True])
def test_a_node_without_the_run_directory_is_an_error_only_where_no_attempt_has_started(
    started: bool, cause: str, early: bool
) -> None:
    clock = Clock(2)
    clock.said(0, "ready")
    actions: list[Action] = []
    if not early:
        actions += clock.gang.history(started, clock.times())
    actions += clock.ended(1, "program-error", 2, recorded=False, unseen=True)
    if early:  # node 0 has not read the ledger yet
        assert not of(actions, RecordFor)
        actions += clock.gang.history(started, clock.times())
    assert of(actions, RecordFor)[0].record.cause == cause
    assert message(actions, "failed")["cause"] == cause


def test_stragglers_are_ended_after_the_commit() -> None:
    clock = Clock(2).started()
    clock.notice(0)
    clock.gang.page(PageView(ended=True), clock.times())
    clock.ended(0, "stop")
    assert told(clock.after(19)) == []
    assert told(clock.after(2)) == ["terminate"]


def test_a_run_that_finishes_unevenly_is_left_alone() -> None:
    clock = Clock(2).started()
    clock.ended(1)
    assert told(clock.after(3600)) == []


def test_a_stop_nobody_follows_ends_after_its_deadline() -> None:
    clock = Clock(2).started()
    clock.notice(0, left=60)
    assert told(clock.after(89)) == []
    assert told(clock.after(2)) == ["terminate"]


def test_a_time_limit_nobody_follows_leaves_time_to_decide() -> None:
    clock = Clock(2).started()
    clock.gang.stop_file(StopRequest(why="time-limit", who="slurm", deadline=CLOCK + 300), clock.times())
    assert told(clock.after(289)) == []
    assert told(clock.after(1)) == ["terminate"]  # 5 s for SIGKILL, and 5 s for the batch script
    clock.now += 5
    clock.ended(0, "stop")
    clock.ended(1, "stop")
    assert clock.gang.released


@pytest.mark.parametrize(("first", "second"), [("user", "time-limit"), ("time-limit", "notice")])
def test_a_time_limit_counts_whatever_the_stop_is_for(first: str, second: str) -> None:
    clock = Clock(2).started()
    for why in (first, second):
        left = {"user": 0.0, "time-limit": CLOCK + 300, "notice": CLOCK + 280}[why]
        clock.gang.stop_file(StopRequest(why=why, deadline=left), clock.times())
    assert told(clock.after(289)) == []
    assert told(clock.after(1)) == ["terminate"]


def test_a_signal_for_the_time_limit_has_slurm_asked_for_the_end() -> None:
    clock = Clock(2).started()
    assert of(clock.said(0, "stop", why="time-limit"), AskLimit)
    assert not of(clock.said(1, "stop", why="time-limit"), AskLimit)  # once
    clock.now += 1
    assert message(clock.gang.limit(CLOCK + 300, clock.times()), "stop")["deadline"] == CLOCK + 300
    clock.now = 250
    clock.ended(0, "stop")
    assert told(clock.ended(1, "stop")) == []  # the mirror
    assert told(clock.after(44)) == []
    assert told(clock.after(1)) == ["release"]


NAMES = ["ready", "notice", "rebalance", "stop", "armed", "bind-failed", "ended", "unheard-of"]
STEPS = st.tuples(
    st.integers(0, 3),
    st.sampled_from([*NAMES, "gone", "wait"]),
    st.sampled_from(["done", "stop", "peer-lost", "program-error", "signal"]),
)


@given(st.lists(STEPS, max_size=60))
def test_whatever_happens_all_are_released_in_bounded_time_and_only_once(steps: list[tuple[int, str, str]]) -> None:
    """A node may die at any moment: once all others have ended or are lost, the gang ends within its own bounds."""
    clock = Clock(4)
    actions: list[Action] = []
    for node, what, cause in steps:
        if what == "gone":
            actions += clock.gang.gone(node, "gone", clock.times()) if node else []
        elif what == "wait":
            actions += clock.after(7)
        else:
            actions += clock.said(node, what, cause=cause, time=CLOCK + 50, **{"try": 1})
    for node in range(4):
        actions += clock.said(node, "ready")
    for _ in range(200):
        actions += clock.after(5)
        for node in range(4):
            if node not in clock.gang.ended and node not in clock.gang.lost:
                actions += clock.ended(node, "stop")
    assert told(actions).count("release") == 1
    assert set(entered(actions)) <= set(EVENTS)
    assert len(of(actions, Arm)) <= 1
    assert len(of(actions, FinishMirror)) == 1
