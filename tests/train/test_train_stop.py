"""Real ranks agree on a stop: near each other, far apart, near the end, and when the save cannot fit."""

from __future__ import annotations

import time

import pytest
from trainer_harness import Trainer, finish

from pctool.run.page import Outcome

pytestmark = pytest.mark.torch


def test_ranks_far_apart_stop_at_one_step(trainer: Trainer) -> None:
    """No collective in a step and one rank three times slower: it is the faster one that moves the target."""
    process = trainer.start("--drift", "--step-s", "0.01", "--every", "1000", "--steps", "1000")
    trainer.await_step(30, process)
    trainer.stop()
    finish(process, 0)
    (stop,) = trainer.events("stop-step")
    assert trainer.page.outcome is Outcome.STOPPED
    for rank in range(2):
        assert max(trainer.metrics(rank)) == stop["step"]
    assert [event["step"] for event in trainer.events("committed")] == [stop["step"]]


def test_a_flag_without_permission_stops_nobody(trainer: Trainer) -> None:
    process = trainer.start("--steps", "30")
    trainer.page.request_stop(reason="notice", deadline=0.0)
    finish(process, 0)
    assert trainer.page.outcome is Outcome.DONE
    assert trainer.page.step == 30


def test_a_stop_before_the_first_step_is_saved_too(trainer: Trainer) -> None:
    process = trainer.start("--steps", "300", "--every", "1000")
    trainer.stop(deadline=time.time() + 120)
    finish(process, 0)
    assert trainer.page.outcome is Outcome.STOPPED
    assert trainer.page.committed == trainer.events("stop-step")[0]["step"] < 10


def test_a_save_that_cannot_fit_is_skipped_and_said(trainer: Trainer) -> None:
    process = trainer.start("--steps", "3000", "--every", "50", "--step-s", "0.02")
    trainer.await_step(51, process)
    trainer.stop(deadline=time.time() + 0.001)
    finish(process, 0)
    (stop,) = trainer.events("stop-step")
    assert trainer.page.outcome is Outcome.STOPPED_UNSAVED
    (skipped,) = trainer.events("final-save-skipped")
    assert skipped["predicted_s"] > skipped["left_s"]
    assert trainer.page.committed == trainer.events("committed")[-1]["step"] < stop["step"]


@pytest.mark.parametrize("ask_at", [26, 28, 29])
def test_a_stop_in_the_last_steps_ends_the_run_or_stops_it(trainer: Trainer, ask_at: int) -> None:
    process = trainer.start("--steps", "30", "--step-s", "0.01")
    trainer.await_step(ask_at, process)
    trainer.stop(deadline=time.time() + 60)
    finish(process, 0)
    assert trainer.page.outcome in {Outcome.DONE, Outcome.STOPPED}
    assert trainer.page.committed == trainer.page.step
