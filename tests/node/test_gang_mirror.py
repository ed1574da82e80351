"""The mirror's process: told of commits, waited for at the end, and never longer than the deadline allows."""

from __future__ import annotations

import time
from collections.abc import Callable

from gang_harness import Gang

MakeGang = Callable[..., Gang]
STORE = "s3://bucket/prefix"


def told(one: Gang) -> list[str]:
    return (one.run.path / "mirror-told").read_text().splitlines()


def test_launches_end_when_the_mirror_is_done(gang: MakeGang) -> None:
    one = gang(nodes=2)
    one.start("trainer.py", PCTOOL_STORE=STORE, STANDIN_MIRROR="1.5")
    one.stepping()
    one.notice(1, seconds=200)
    one.until(lambda: one.processes[1].poll() is not None, "the end of launch 1")
    assert (one.run.path / "mirror-done").exists()
    assert one.codes() == [0, 0], one.story()
    lines = told(one)
    assert lines[0] == "mirror"
    deadline = float(lines[1].removeprefix("finish "))
    assert 100 < deadline - time.time() < 196  # it ends before the notice's own deadline


def test_a_mirror_that_does_not_end_is_left_behind_before_the_deadline(gang: MakeGang) -> None:
    one = gang(nodes=2)
    one.start("trainer.py", PCTOOL_STORE=STORE, STANDIN_MIRROR="600")
    one.stepping()
    one.notice(1, seconds=12)
    assert one.codes() == [0, 0], one.story()
    assert not (one.run.path / "mirror-done").exists()
    assert one.causes() == ["stop", "stop"]


def test_a_mirror_that_dies_is_started_anew_for_the_next_commit(gang: MakeGang) -> None:
    one = gang(nodes=1)
    one.start("trainer.py", PCTOOL_STORE=STORE, STANDIN_MIRROR="die")
    one.stepping()
    one.until(lambda: "the mirror ended with 1" in one.err(0), "the mirror's end")
    one.notice(0)
    assert one.codes() == [0], one.story()
    assert [line.split()[0] for line in told(one)] == ["mirror", "finish"]


def test_an_attempt_that_steps_back_mirrors_nothing(gang: MakeGang) -> None:
    one = gang(nodes=1)
    one.notice(0)
    one.start("trainer.py", PCTOOL_STORE=STORE, STANDIN_MIRROR="600")
    assert one.codes() == [0], one.story()
    assert not (one.run.path / "mirror-told").exists()
