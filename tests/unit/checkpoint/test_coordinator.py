"""A checkpoint is made if and only if every rank's writer has written its part."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pctool.checkpoint.coordinator import Coordinator, Order
from pctool.checkpoint.frames import Frame, Receiver, send
from pctool.checkpoint.manifest import is_complete
from pctool.checkpoint.retention import Retention
from pctool.checkpoint.writing import write_bytes
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.page import Page

NAME = "000000-00000010"


class Peer:
    """A writer's end of its connection."""

    def __init__(self, port: int, rank: int, token: str = "secret") -> None:
        self.rank = rank
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.receiver = Receiver(self.sock)
        self.say(op="hello", rank=rank, token=token)

    def say(self, **fields: Any) -> None:
        send(self.sock, fields)

    def hears(self) -> Frame | None:
        return self.receiver.next()

    def writes(self, run: RunDir, name: str = NAME) -> None:
        folder = run.checkpoints / name
        folder.mkdir(parents=True, exist_ok=True)
        file = f"__{self.rank}_0.distcp"
        entry = write_bytes(bytes([self.rank]) * 100, folder / file)
        self.say(op="written", name=name, files={file: asdict(entry)})


class Stage:
    def __init__(self, run: RunDir, world: int) -> None:
        self.run, self.page = run, Page.create()
        self.said: list[str] = []
        self.coordinator = Coordinator(
            run=run,
            attempt=0,
            world=world,
            server=socket.create_server(("127.0.0.1", 0)),
            token="secret",
            keep=Retention(),
            page=self.page,
            say=self.said.append,
        )
        self.peers = [Peer(self.coordinator.port, rank) for rank in range(world)]
        for peer in self.peers:
            welcome = peer.hears()
            assert welcome is not None
            assert welcome.op == "welcome"

    def order(self, step: int = 10) -> None:
        fields = {"parent": None, "world_size": len(self.peers)}
        self.coordinator.expect(Order(name=f"000000-{step:08d}", step=step, began=1.0, fields=fields))

    def verdicts(self) -> list[tuple[str, str]]:
        frames = [peer.hears() for peer in self.peers if peer.sock.fileno() >= 0]
        return [(frame.op, str(frame.fields.get("why", ""))) for frame in frames if frame is not None]

    def events(self) -> list[str]:
        return [event.event for event in Ledger(self.run.ledger).read()]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    run = RunDir(tmp_path)
    run.attempt(0).path.mkdir(parents=True)
    stage = Stage(run, 3)
    yield stage
    for peer in stage.peers:
        peer.sock.close()
    assert stage.coordinator.close(20.0)
    stage.page.close()


def test_all_have_written(stage: Stage) -> None:
    stage.peers[2].writes(stage.run)  # it may come before the order does
    stage.order()
    stage.peers[0].writes(stage.run)
    assert stage.page.writing_since == 1.0
    assert not (stage.run.checkpoints / NAME / "MANIFEST").exists()
    stage.peers[1].writes(stage.run)
    assert stage.verdicts() == [("committed", "")] * 3
    verdict = is_complete(stage.run.checkpoints / NAME)
    assert verdict.ok
    assert verdict.manifest is not None
    assert sorted(verdict.manifest.files) == [f"__{rank}_0.distcp" for rank in range(3)]
    assert stage.page.committed == 10
    assert stage.events() == ["committed"]


def test_one_could_not_write(stage: Stage) -> None:
    stage.order()
    stage.peers[0].writes(stage.run)
    stage.peers[1].say(op="failed", name=NAME, why="No space left on device")
    stage.peers[2].writes(stage.run)
    assert stage.verdicts() == [("failed", "rank 1: No space left on device")] * 3
    assert not (stage.run.checkpoints / NAME).exists()  # its room is the next one's
    assert stage.events() == ["commit-failed"]


def test_nothing_is_removed_while_another_still_writes(stage: Stage) -> None:
    stage.order()
    stage.peers[0].writes(stage.run)
    stage.peers[1].say(op="failed", name=NAME, why="x")
    stage.peers[0].say(op="failed", name="000000-00000011", why="y")  # answered after the ones before
    assert (stage.run.checkpoints / NAME / "__0_0.distcp").exists()
    stage.peers[2].writes(stage.run)
    assert {op for op, _ in stage.verdicts()} == {"failed"}


def test_a_rank_that_went_after_it_was_written_is_not_missed(stage: Stage) -> None:
    stage.order()
    for peer in stage.peers:
        peer.writes(stage.run)
        if peer.rank == 2:
            peer.sock.close()
    assert stage.verdicts() == [("committed", "")] * 2


@pytest.mark.parametrize("how", ["gone", "closed"])
def test_a_rank_that_went_before_has_torn_it(stage: Stage, how: str) -> None:
    stage.order()
    stage.peers[0].writes(stage.run)
    stage.peers[2].writes(stage.run)
    if how == "gone":
        stage.peers[1].say(op="gone")
    else:
        stage.peers[1].sock.close()
    assert set(stage.verdicts()) == {("failed", "rank 1 has gone without having written it")}
    assert not is_complete_there(stage.run)


def is_complete_there(run: RunDir) -> bool:
    folder = run.checkpoints / NAME
    return folder.exists() and is_complete(folder).ok


def test_a_newer_attempt_fences(stage: Stage) -> None:
    stage.run.attempt(1).path.mkdir()
    stage.order()
    for peer in stage.peers:
        peer.writes(stage.run)
    frames = [peer.hears() for peer in stage.peers]
    assert {(frame.op, frame.fields["fenced"]) for frame in frames if frame is not None} == {("failed", True)}
    assert not is_complete_there(stage.run)
    assert (stage.run.checkpoints / NAME).exists()  # the newer attempt clears it; this one touches nothing any more


def test_a_file_that_is_not_there_is_not_believed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pctool.checkpoint.coordinator.STALE_S", 0.1)
    stage.order()
    for peer in stage.peers[:2]:
        peer.writes(stage.run)
    stage.peers[2].say(op="written", name=NAME, files={"__2_0.distcp": {"size": 5, "crc64nvme": "AAAAAAAAAAA="}})
    assert all(op == "failed" and "__2_0.distcp: missing" in why for op, why in stage.verdicts())


def test_a_stranger_is_not_heard(stage: Stage) -> None:
    stranger = Peer(stage.coordinator.port, 1, token="guessed")
    assert stranger.hears() is None
    stranger.sock.close()
    stage.order()
    for peer in stage.peers:
        peer.writes(stage.run)
    assert stage.verdicts() == [("committed", "")] * 3
