"""The page that a launch shares with its ranks, across processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pctool.run.page import Outcome, Page


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page.create()
    yield page
    page.close()


def in_another_process(page: Page, program: str) -> str:
    """Run `program` with the page opened as `page`, as a rank does, and return what it prints."""
    opened = f"import sys\nfrom pctool.run.page import Outcome, Page\npage = Page.open(sys.argv[1])\n{program}"
    argv = [sys.executable, "-c", opened, page.path]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def test_a_new_page_says_nothing(page: Page) -> None:
    assert not page.stop_requested
    assert not page.may_publish
    assert (page.step, page.committed, page.first_step) == (-1, -1, -1)
    assert (page.deadline, page.reason, page.saving_since, page.step_time) == (0.0, "", 0.0, 0.0)
    assert page.outcome is Outcome.NONE


def test_a_rank_sees_what_launch_asks(page: Page) -> None:
    page.request_stop(reason="notice on n-2", deadline=1234.5)
    page.allow_publish()
    seen = in_another_process(page, "print(page.stop_requested, page.may_publish, page.deadline, page.reason, sep='|')")
    assert seen == "True|True|1234.5|notice on n-2"


def test_launch_sees_what_a_rank_reports(page: Page) -> None:
    in_another_process(
        page,
        "page.report_step(41, 10.0); page.report_step(42, 11.5); page.report_saving(12.0)\n"
        "page.report_committed(42); page.report_outcome(Outcome.STOPPED)",
    )
    assert (page.first_step, page.step, page.step_time) == (41, 42, 11.5)
    assert (page.saving_since, page.committed, page.outcome) == (12.0, 42, Outcome.STOPPED)
    page.report_saving(0)
    assert page.saving_since == 0.0


def test_a_rank_that_is_waiting_sees_the_stop_while_it_runs(page: Page) -> None:
    program = (
        "import time\nprint('ready', flush=True)\nend = time.monotonic() + 30\n"
        "while not page.stop_requested and time.monotonic() < end: pass\nprint(page.reason, page.deadline)"
    )
    opened = f"import sys\nfrom pctool.run.page import Page\npage = Page.open(sys.argv[1])\n{program}"
    with subprocess.Popen([sys.executable, "-c", opened, page.path], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        page.request_stop(reason="user", deadline=7.0)  # reason and deadline are there when the byte is
        assert rank.stdout.readline() == "user 7.0\n"


@given(st.text(), st.floats(allow_nan=False))
def test_any_reason_fits(reason: str, deadline: float) -> None:
    page = Page.create()
    try:
        page.request_stop(reason=reason, deadline=deadline)
        assert page.stop_requested
        assert page.deadline == deadline
        assert len(page.reason.encode()) <= 768
        if "\0" not in reason and len(reason.encode()) < 200:
            assert page.reason == reason
    finally:
        page.close()


def test_a_longer_reason_than_fits_touches_nothing_else(page: Page) -> None:
    page.report_step(5, 1.0)
    page.request_stop(reason="x" * 10_000, deadline=3.0)
    page.request_stop(reason="short", deadline=3.0)
    assert page.reason == "short"
    assert (page.step, page.deadline, page.committed) == (5, 3.0, -1)


def test_the_page_is_gone_with_its_launch() -> None:
    program = "from pctool.run.page import Page\npage = Page.create()\nprint(page.path, flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launch:
        assert launch.stdout is not None
        path = launch.stdout.readline().strip()
        Page.open(path).close()
        launch.kill()
    with pytest.raises(FileNotFoundError):
        Page.open(path)


def test_a_step_costs_one_read_of_memory(page: Page) -> None:
    """Guard against a system call sneaking in: it takes a fraction of what opening a file does."""
    began = time.process_time_ns()
    for _ in range(100_000):
        if page.stop_requested:
            raise AssertionError
    own = time.process_time_ns() - began
    began = time.process_time_ns()
    for _ in range(100_000):
        with open(page.path, "rb"):
            pass
    assert own * 3 < time.process_time_ns() - began
