"""What one launch decides for its node, without processes or time."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from pctool.node.actions import Action, EndRanks, Exit, Record, RequestStop, StartRanks, Tell, Timing
from pctool.node.member import Member, RanksEnd
from pctool.run.page import Outcome

START = {"type": "start", "try": 1, "address": "a", "port": 1}
STOP = {"type": "stop", "why": "notice", "node": "n1", "deadline": 5.0}
LOST = {"type": "failed", "node": 2, "cause": "peer-lost", "why": "n2 is lost: silent"}


def member(*, running: bool = True, stop_signal: bool = False) -> Member:
    one = Member(name="n1", stop_signal=stop_signal, timing=Timing())
    if running:
        one.said(START, 0.0)
    return one


def end(one: Member, kind: Any = "ok", **fields: Any) -> list[Action]:
    return one.ranks_ended(RanksEnd(try_=1, kind=kind, **fields), 0.0)


def recorded(actions: list[Action]) -> tuple[str, int, bool]:
    records = [action for action in actions if isinstance(action, Record)]
    assert len(records) == 1, actions
    return records[0].cause, records[0].code, records[0].saved


def exits(actions: list[Action]) -> list[int]:
    return [action.code for action in actions if isinstance(action, Exit)]


def told(actions: list[Action]) -> list[str]:
    return [action.message["type"] for action in actions if isinstance(action, Tell)]


def has(actions: list[Action], kind: type[Action]) -> bool:
    return any(isinstance(action, kind) for action in actions)


@pytest.mark.parametrize(
    ("stopping", "stop_signal", "outcome", "expected"),
    [
        (False, False, Outcome.NONE, ("done", 0, False)),
        (False, False, Outcome.DONE, ("done", 0, False)),
        (True, False, Outcome.STOPPED, ("stop", 0, True)),
        (True, False, Outcome.STOPPED_UNSAVED, ("stop", 0, False)),
        (True, False, Outcome.DONE, ("done", 0, False)),  # it finished before it saw the stop
        (True, False, Outcome.NONE, ("done", 0, False)),  # it never looked, and finished
        (True, True, Outcome.NONE, ("stop", 0, True)),  # it got the signal
        (False, True, Outcome.NONE, ("done", 0, False)),
    ],
)
def test_ranks_that_exit_0(
    stopping: bool, stop_signal: bool, outcome: Outcome, expected: tuple[str, int, bool]
) -> None:
    one = member(stop_signal=stop_signal)
    if stopping:
        one.said(STOP, 0.0)
    actions = end(one, outcome=outcome)
    assert recorded(actions) == expected
    assert exits(actions) == []  # it waits for the gang
    assert exits(one.said({"type": "release"}, 0.0)) == [0]


def test_ranks_that_fail_by_themselves() -> None:
    assert recorded(end(member(), "failed", code=7)) == ("program-error", 7, False)
    assert recorded(end(member(), "failed", code=1, communication=True)) == ("peer-lost", 1, False)
    assert recorded(end(member(), "rendezvous", code=1)) == ("peer-lost", 1, False)
    assert recorded(end(member(), "failed", code=137, killed=True)) == ("signal", 137, False)
    assert recorded(end(member(), "failed", code=143)) == ("program-error", 143, False)  # it exited with 143


def test_a_crash_in_teardown_after_the_agreed_stop_is_a_stop() -> None:
    assert recorded(end(member(), "failed", code=134, outcome=Outcome.STOPPED)) == ("stop", 0, True)
    assert recorded(end(member(), "failed", code=134, outcome=Outcome.DONE)) == ("program-error", 134, False)


def test_an_abort_in_teardown_of_a_finished_run_is_no_failure() -> None:
    aborted = {"code": 134, "killed": True, "teardown": True}
    assert recorded(end(member(), "failed", outcome=Outcome.DONE, **aborted)) == ("done", 0, False)
    one = member(stop_signal=True)
    one.said(STOP, 0.0)
    assert recorded(end(one, "failed", **aborted)) == ("stop", 0, True)
    assert recorded(end(member(), "failed", **aborted)) == ("signal", 134, False)  # it may have had any exit code


def test_a_stop_sets_the_flag_and_is_acknowledged() -> None:
    actions = member().said(STOP, 0.0)
    assert RequestStop("notice", 5.0) in actions
    assert told(actions) == ["armed"]


def test_after_a_known_loss_ranks_that_were_ended_or_lost_touch_are_lost() -> None:
    for fields in ({"communication": True, "code": 1}, {"killed": True, "code": 143}):
        one = member()
        one.said(LOST, 0.0)
        assert recorded(end(one, "failed", **fields)) == ("peer-lost", 1, False)
    one = member()
    one.said(LOST, 0.0)
    one.said({"type": "terminate", "why": "x"}, 5.0)
    assert recorded(end(one, "failed", code=137)) == ("peer-lost", 1, False)


def test_a_program_error_of_its_own_stays_one_after_a_known_loss() -> None:
    one = member()
    one.said(LOST, 0.0)
    assert recorded(end(one, "failed", code=3)) == ("program-error", 3, False)


def test_the_ranks_are_ended_even_if_the_hub_dies_before_it_can_say_so() -> None:
    one = member()
    one.said(LOST, 100.0)
    assert not has(one.tick(111.0), EndRanks)
    assert has(one.tick(112.5), EndRanks)
    assert not has(one.tick(113.0), EndRanks)


def test_without_a_hub_nobody_is_waited_for() -> None:
    one = member()
    assert exits(one.hub_gone("connection closed", 10.0)) == []
    assert has(one.tick(15.5), EndRanks)
    actions = end(one, "failed", code=143)
    assert recorded(actions) == ("peer-lost", 1, False)
    assert exits(actions) == [1]


def test_a_hub_that_goes_after_our_end_changes_nothing_in_it() -> None:
    one = member()
    one.said(STOP, 0.0)
    end(one, outcome=Outcome.STOPPED)
    assert exits(one.hub_gone("connection closed", 1.0)) == [0]


def test_sigterm_records_at_once_ends_the_ranks_and_waits_for_nobody() -> None:
    one = member()
    actions = one.signalled(signal.SIGTERM, 0.0)
    assert recorded(actions) == ("signal", 143, False)
    assert has(actions, EndRanks)
    assert one.signalled(signal.SIGTERM, 0.0) == []
    assert exits(end(one, "failed", code=143)) == [143]


def test_sigterm_before_the_start_and_after_the_end() -> None:
    assert exits(member(running=False).signalled(signal.SIGINT, 0.0)) == [130]
    one = member()
    end(one, "failed", code=9)
    assert exits(one.signalled(signal.SIGTERM, 0.0)) == [9]


def test_usr1_only_asks() -> None:
    actions = member().signalled(signal.SIGUSR1, 0.0)
    assert told(actions) == ["stop"]
    assert not has(actions, EndRanks)


def test_a_new_try_replaces_the_one_before() -> None:
    one = member()
    assert told(end(one, "bind-failed")) == ["bind-failed"]
    actions = one.said({**START, "try": 2, "port": 2}, 0.0)
    assert StartRanks(2, "a", 2) in actions
    assert end(one, "failed", code=1) == []  # the first try's end comes late
    assert one.running
    assert one.said({**START, "try": 2}, 0.0) == []


def test_stepping_back_ends_well_and_unsaved() -> None:
    one = member(running=False)
    actions = one.said({"type": "step-back", "why": "standing-notice", "node": "n2"}, 0.0)
    assert recorded(actions) == ("stop", 0, False)
    assert exits(one.said({"type": "release"}, 0.0)) == [0]


def test_a_failure_elsewhere_before_the_start_ends_this_one_too() -> None:
    one = member(running=False)
    assert recorded(one.said(LOST, 0.0)) == ("peer-lost", 1, False)
    assert one.said(START, 0.0) == []


def test_a_refusal_waits_shortly_for_the_hub_to_hear_it() -> None:
    one = member(running=False)
    actions = one.refuse(Record("program-error", 2, "no torch", saved=False), 0.0, recorded=False)
    assert not has(actions, Record)
    assert told(actions) == ["ended"]
    assert exits(one.tick(14.0)) == []
    assert exits(one.tick(15.5)) == [2]


def test_a_hub_that_lives_is_waited_for_however_long_node_0_works_on() -> None:
    """srun counts from the first launch that ends: node 0 may evaluate, export and mirror for hours after the loop."""
    one = member()
    end(one)
    assert exits(one.tick(86400.0)) == []
    assert exits(one.hub_gone("silent for 20 s", 86401.0)) == [0]


def test_a_release_while_ranks_run_ends_them() -> None:
    one = member()
    one.said(STOP, 0.0)
    assert has(one.said({"type": "release"}, 0.0), EndRanks)
    actions = end(one, "failed", code=143)
    assert recorded(actions) == ("stop", 0, False)
    assert exits(actions) == [0]


def test_unknown_messages_are_ignored() -> None:
    assert member().said({"type": "from the future"}, 0.0) == []
    assert member().said({}, 0.0) == []
