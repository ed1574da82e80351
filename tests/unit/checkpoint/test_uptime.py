"""How long gangs stay up, from ledgers as runs leave them."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pctool.checkpoint.uptime import (
    SPOT_GANG_S,
    Life,
    Uptime,
    assumed_uptime,
    follow_uptime,
    lives_of,
    mean_uptime,
)
from pctool.run.layout import RunDir
from pctool.run.ledger import Event, Ledger

HOUR = 3600.0


def event(time: float, name: str, attempt: int = 0, **fields: Any) -> Event:
    return Event(time=time, attempt=attempt, event=name, fields=fields)


STARTED = [event(0, "claim"), event(60, "first-step", step=1), event(500, "committed", step=100)]
NOTICED = [event(1000, "stop-requested", why="notice"), event(1001, "notice"), event(1005, "stop-step", step=200)]


@pytest.mark.parametrize(
    ("rest", "life"),
    [
        ([event(900, "peer-lost"), event(930, "decided", cause="peer-lost")], Life(up_s=900, ended=True)),
        (
            [*NOTICED, event(1020, "committed", step=200), event(1030, "decided", cause="stop")],
            Life(up_s=1000, ended=True, noticed=True),
        ),
        (
            [*NOTICED, event(1030, "decided", cause="peer-lost")],
            Life(up_s=1000, ended=True),
        ),  # gone before it was saved
        ([*NOTICED, event(1010, "final-save-skipped", step=200)], Life(up_s=1000, ended=True)),
        ([event(800, "stop-requested", why="user"), event(810, "decided", cause="stop")], Life(up_s=800, ended=False)),
        (
            [event(800, "stop-requested", why="time-limit"), event(810, "decided", cause="stop")],
            Life(up_s=800, ended=False),
        ),
        ([event(700, "decided", cause="done")], Life(up_s=700, ended=False)),
        ([event(700, "decided", cause="program-error")], Life(up_s=700, ended=True)),
        ([event(700, "node-exit", cause="signal")], Life(up_s=700, ended=False)),  # cancelled
        ([], Life(up_s=2000, ended=True)),  # the batch node was lost with its last words
    ],
)
def test_how_each_attempt_ended(rest: Sequence[Event], life: Life) -> None:
    assert lives_of([*STARTED, *rest], before=1, heard={0: 2000.0} if not rest else {}) == [life]


def test_without_a_heartbeat_it_lived_until_its_last_event() -> None:
    assert lives_of(STARTED, before=1) == [Life(up_s=500, ended=True)]


def test_an_error_before_the_first_step_lost_no_work() -> None:
    events = [event(0, "claim"), event(40, "decided", cause="program-error")]
    assert lives_of(events, before=1) == [Life(up_s=40, ended=False)]


def test_a_step_back_is_not_counted_twice_and_the_current_attempt_is_not_over() -> None:
    events = [event(0, "claim"), event(3, "step-back"), event(4, "decided", cause="stop"), event(100, "claim", 1)]
    assert lives_of(events, before=1) == []


def test_the_assumption_fades_as_evidence_comes() -> None:
    assert mean_uptime([], SPOT_GANG_S) == Uptime(mean_s=SPOT_GANG_S, noticed=0, attempts=0, ends=0)
    lives = [Life(up_s=10 * HOUR, ended=True)] * 20
    assert mean_uptime(lives, SPOT_GANG_S).mean_s == pytest.approx(9.6 * HOUR, rel=0.01)
    quiet = mean_uptime([Life(up_s=30 * HOUR, ended=False)], SPOT_GANG_S)
    assert (quiet.mean_s, quiet.ends) == (31.7 * HOUR, 0)


def test_all_noticed_is_never_one() -> None:
    lives = [Life(up_s=HOUR, ended=True, noticed=True)] * 9
    assert mean_uptime(lives, SPOT_GANG_S).noticed == 0.9


def test_lives_that_were_cut_off_do_not_bias_the_mean() -> None:
    """Two in three gangs end by their time limit of 2 h; the mean up-time is 5 h all the same."""
    draw = random.Random(3)
    drawn = [draw.expovariate(1 / (5 * HOUR)) for _ in range(4000)]
    lives = [Life(up_s=min(life, 2 * HOUR), ended=life < 2 * HOUR) for life in drawn]
    assert mean_uptime(lives, SPOT_GANG_S).mean_s == pytest.approx(5 * HOUR, rel=0.06)


def test_what_is_assumed_is_the_shorter_unless_told() -> None:
    assert assumed_uptime(16, spot=True) == assumed_uptime(1, spot=True) == SPOT_GANG_S
    assert assumed_uptime(16, spot=False) / 86400 == pytest.approx(1000 / 6.5 / 16)
    assert assumed_uptime(16) == SPOT_GANG_S
    assert assumed_uptime(4000) < SPOT_GANG_S


def test_it_is_read_from_a_run_directory(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    ledger = Ledger(run.ledger)
    ledger.append("claim", attempt=0)
    ledger.append("claim", attempt=1)
    claimed = ledger.read()
    run.attempt(0).path.mkdir(parents=True)
    run.attempt(0).heartbeat.write_text("{}")
    os.utime(run.attempt(0).heartbeat, (claimed[0].time + 7200, claimed[0].time + 7200))
    now = [claimed[1].time + 3600]
    uptime = follow_uptime(run, attempt=1, nodes=4, spot=True, clock=lambda: now[0])
    assert uptime().mean_s == pytest.approx((SPOT_GANG_S + 7200 + 3600) / 2)
    now[0] += 3600
    assert uptime().mean_s == pytest.approx((SPOT_GANG_S + 7200 + 7200) / 2)
    assert str(uptime()) == "up-time 2 h 51 min from 2 attempts"


def test_without_a_ledger_it_is_assumed_and_says_so(tmp_path: Path) -> None:
    uptime = follow_uptime(RunDir(tmp_path), attempt=0, nodes=4, clock=lambda: 5.0)()
    assert (uptime.mean_s, str(uptime)) == (
        SPOT_GANG_S,
        "up-time 1 h 42 min (assumed: no loss yet in 1 attempt)",
    )
