"""The notice file is believed only while it is fresh and speaks of this node."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pctool.aws.imds import Notice
from pctool.node.notice_file import FRESH_S, Sighting, read_sighting, touch, write_sighting

SEEN = Sighting(node="n1", notice=Notice(action="terminate", time=12.5), rebalance=3.0)


def test_what_is_written_is_read_back_and_readable_by_all(tmp_path: Path) -> None:
    path = tmp_path / "run" / "notice.json"
    before = os.umask(0o077)
    try:
        write_sighting(path, SEEN)
    finally:
        os.umask(before)
    assert read_sighting(path, node="n1", now=time.time()) == SEEN
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_stale_file_is_no_news_until_it_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "notice.json"
    write_sighting(path, SEEN)
    os.utime(path, (0, time.time() - FRESH_S - 1))
    assert read_sighting(path, node="n1", now=time.time()) is None
    touch(path)
    assert read_sighting(path, node="n1", now=time.time()) == SEEN


def test_another_nodes_file_is_no_news(tmp_path: Path) -> None:
    path = tmp_path / "notice.json"
    write_sighting(path, SEEN)
    assert read_sighting(path, node="n2", now=time.time()) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"node": "n1"}', '{"node":"n1","notice":{"x":1},"rebalance":null}'])
def test_a_file_that_cannot_be_read_is_no_news(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notice.json"
    path.write_text(text)
    assert read_sighting(path, node="n1", now=time.time()) is None
    assert read_sighting(tmp_path / "none.json", node="n1", now=time.time()) is None
