"""The watcher tells news once, logs failures once a change, and outlives all of them."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from pctool.aws.fake_imds import FakeImds
from pctool.aws.imds import Imds, ImdsFailedError, Notice
from pctool.errors import UsageError
from pctool.node.naming import names_on_host
from pctool.node.notice_file import FRESH_S, Sighting, read_sighting, write_sighting
from pctool.node.watch import Looker, NodeWatch, Watcher, check_poll

WHEN = datetime(2030, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
NOTICE = Notice(action="terminate", time=WHEN.timestamp())


@pytest.fixture
def fake() -> Iterator[FakeImds]:
    service = FakeImds()
    service.add("n1", instance_id="i-1", instance_type="p5.48xlarge", availability_zone="us-east-1a")
    yield service
    service.close()


class Heard:
    def __init__(self) -> None:
        self.news: queue.Queue[Notice | float | str] = queue.Queue()
        self.logged: list[str] = []

    def next(self) -> Notice | float | str:
        return self.news.get(timeout=20)


def watcher(fake: FakeImds, heard: Heard, *, notice_file: Path | None = None) -> Watcher:
    imds = Imds(fake.endpoint("n1"), timeout=0.2, total=0.4)
    return Watcher(
        Looker(node="n1", imds=imds, notice_file=notice_file),
        on_notice=heard.news.put,
        on_rebalance=heard.news.put,
        on_first=lambda: heard.news.put("first"),
        log=heard.logged.append,
        poll_s=0.02,
    )


def wait_for(heard: Heard, lines: int) -> None:
    deadline = time.monotonic() + 20
    while len(heard.logged) < lines:
        assert time.monotonic() < deadline, heard.logged
        time.sleep(0.01)


def test_news_are_told_once_and_a_moved_notice_again(fake: FakeImds) -> None:
    heard = Heard()
    thread = watcher(fake, heard)
    thread.start()
    assert heard.next() == "first"
    fake.notice("n1", when=WHEN)
    assert heard.next() == NOTICE
    fake.rebalance("n1")
    assert isinstance(heard.next(), float)
    later = fake.requests("n1") + 8  # some more looks
    while fake.requests("n1") < later:
        time.sleep(0.01)
    assert heard.news.empty()
    fake.notice("n1", action="stop", when=WHEN)
    assert heard.next() == Notice(action="stop", time=NOTICE.time)
    thread.stop()
    thread.join(20)
    assert not thread.is_alive()


def test_a_standing_notice_comes_before_the_first_look_is_over(fake: FakeImds) -> None:
    fake.notice("n1", when=WHEN)
    heard = Heard()
    thread = watcher(fake, heard)
    thread.start()
    assert (heard.next(), heard.next()) == (NOTICE, "first")
    thread.stop()


def test_failures_are_logged_once_a_change_and_never_end_the_watch(fake: FakeImds) -> None:
    heard = Heard()
    fake.fault("n1", "500")
    thread = watcher(fake, heard)
    thread.start()
    assert heard.next() == "first"
    fake.fault("n1", "refuse-token")
    wait_for(heard, 2)
    fake.fault("n1", "hang")
    wait_for(heard, 3)
    fake.fault("n1", None)
    wait_for(heard, 4)
    fake.notice("n1", when=WHEN)
    assert heard.next() == NOTICE
    said = ["500", "gives no token (403)", "no answer in 0.2 s", "answers again"]
    assert all(text in line for text, line in zip(said, heard.logged, strict=True)), heard.logged
    thread.stop()


class HalfDeaf(Imds):
    """It answers for the notice, and for a rebalance only while `rebalances`."""

    rebalances = False

    def rebalance(self) -> float | None:
        if self.rebalances:
            return super().rebalance()
        raise ImdsFailedError("answers with 500", where=self.endpoint)


def test_a_notice_is_not_lost_when_the_question_for_a_rebalance_fails(fake: FakeImds) -> None:
    fake.notice("n1", when=WHEN)
    heard = Heard()
    imds = HalfDeaf(fake.endpoint("n1"))
    thread = Watcher(
        Looker(node="n1", imds=imds, notice_file=None),
        on_notice=heard.news.put,
        on_rebalance=heard.news.put,
        on_first=lambda: heard.news.put("first"),
        log=heard.logged.append,
        poll_s=0.02,
    )
    thread.start()
    assert (heard.next(), heard.next()) == (NOTICE, "first")
    later = fake.requests("n1") + 4
    while fake.requests("n1") < later:
        time.sleep(0.01)
    assert len(heard.logged) == 1
    assert "answers with 500; a rebalance recommendation would not be seen" in heard.logged[0]
    imds.rebalances = True
    wait_for(heard, 2)
    assert "answers again" in heard.logged[1]
    thread.stop()


def test_roots_watcher_drains_though_the_question_for_a_rebalance_fails(fake: FakeImds, tmp_path: Path) -> None:
    fake.notice("n1", when=WHEN)
    fake.rebalance("n1")
    logged: list[str] = []
    watch = node_watch(fake, tmp_path / "notice.json", [None], logged, imds=HalfDeaf(fake.endpoint("n1")))
    watch.look()
    assert "drained n1: it gets no new job" in logged
    found = read_sighting(tmp_path / "notice.json", node="n1", now=time.time())
    assert found == Sighting(node="n1", notice=NOTICE)


def test_a_recommendation_once_seen_is_not_told_again_after_a_failure(fake: FakeImds) -> None:
    fake.rebalance("n1")
    imds = HalfDeaf(fake.endpoint("n1"))
    imds.rebalances = True
    looker = Looker(node="n1", imds=imds, notice_file=None)
    first = looker.look()
    imds.rebalances = False
    assert looker.look() == first
    assert first.rebalance is not None


@pytest.mark.parametrize("seconds", [-1.0, 0.0, float("nan"), float("inf"), 3601.0])
def test_a_time_between_looks_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match="--poll-s"):
        check_poll(seconds)
    assert check_poll(0.05) == 0.05


def test_roots_fresh_file_spares_instance_metadata_and_a_stale_one_does_not(fake: FakeImds, tmp_path: Path) -> None:
    path = tmp_path / "notice.json"
    write_sighting(path, Sighting(node="n1", notice=NOTICE))
    looker = Looker(node="n1", imds=Imds(fake.endpoint("n1")), notice_file=path)
    assert looker.look() == Sighting(node="n1", notice=NOTICE)
    assert fake.requests("n1") == 0
    os.utime(path, (0, time.time() - FRESH_S - 1))
    assert looker.look() == Sighting(node="n1")


def node_watch(
    fake: FakeImds, path: Path, answers: list[str | None], logged: list[str], imds: Imds | None = None
) -> NodeWatch:
    return NodeWatch(
        node="n1",
        imds=imds or Imds(fake.endpoint("n1")),
        notice_file=path,
        drain=lambda _node, _notice: answers.pop(0),
        report=lambda _sighting: None,
        log=logged.append,
    )


def test_roots_watcher_keeps_its_file_fresh_and_tells_the_notice(fake: FakeImds, tmp_path: Path) -> None:
    path, logged = tmp_path / "notice.json", list[str]()
    watch = node_watch(fake, path, [None], logged)
    watch.look()
    assert read_sighting(path, node="n1", now=time.time()) == Sighting(node="n1")
    first = path.stat()
    os.utime(path, (0, 0))
    watch.look()
    assert path.stat().st_ino == first.st_ino  # unchanged: touched, not rewritten
    assert path.stat().st_mtime >= first.st_mtime - 1
    fake.notice("n1", when=WHEN)
    watch.look()
    assert read_sighting(path, node="n1", now=time.time()) == Sighting(node="n1", notice=NOTICE)
    assert logged == ["drained n1: it gets no new job"]


def test_a_failed_drain_is_tried_again_and_logged_once(fake: FakeImds, tmp_path: Path) -> None:
    logged: list[str] = []
    answers = ["no slurmctld", "no slurmctld", None]
    watch = node_watch(fake, tmp_path / "notice.json", answers, logged)
    fake.notice("n1", when=WHEN)
    for _ in range(5):
        watch.look()
    assert logged == ["cannot drain n1: no slurmctld; trying on", "drained n1: it gets no new job"]
    assert answers == []


def test_a_failing_service_leaves_the_file_to_grow_stale(fake: FakeImds, tmp_path: Path) -> None:
    path = tmp_path / "notice.json"
    watch = node_watch(fake, path, [], [])
    watch.look()
    os.utime(path, (0, 0))
    fake.fault("n1", "500")
    assert watch.look() is False
    assert path.stat().st_mtime == 0


def test_the_node_is_found_by_its_host() -> None:
    listing = (
        "NodeName=q-dy-p5-1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=q-dy-p5-1 Version=22.05.8\n"
        "NodeName=q-dy-p5-2 NodeAddr=10.0.0.2 NodeHostName=ip-10-0-0-2.ec2.internal State=IDLE\n"
    )
    assert names_on_host(listing, "q-dy-p5-1") == ["q-dy-p5-1"]
    assert names_on_host(listing, "ip-10-0-0-2") == ["q-dy-p5-2"]
    assert names_on_host(listing, "other") == []
