"""What strangers send to the coordinator's port, or others to launch's socket, ends no coordinator and no save."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_gang import Gang, complete_steps

from pctool.checkpoint.coordinator import Coordinator, Order
from pctool.checkpoint.frames import Frame, Receiver, send
from pctool.checkpoint.retention import Retention
from pctool.checkpoint.writing import write_bytes
from pctool.run.layout import RunDir

TOKEN = "right"
WORLD = 2


class Peer:
    """A connection to the coordinator."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=10.0)
        self.receiver = Receiver(self.sock)

    def hello(self, rank: object, token: str = TOKEN) -> Peer:
        send(self.sock, {"op": "hello", "rank": rank, "token": token})
        return self

    def next(self) -> Frame | None:
        return self.receiver.next()

    def ended(self) -> bool:
        """Return whether the coordinator closes the connection without a word."""
        return self.next() is None


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.attempt(0).path.mkdir(parents=True)
    return run


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def coordinator(run: RunDir, said: list[str]) -> Iterator[Coordinator]:
    server = socket.create_server(("127.0.0.1", 0))
    one = Coordinator(
        run=run, attempt=0, world=WORLD, server=server, token=TOKEN, keep=Retention(), page=None, say=said.append
    )
    yield one
    assert one.close(10.0)


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    found: list[Peer] = []
    yield found
    for peer in found:
        peer.sock.close()


def written(peer: Peer, run: RunDir, step: int, rank: int) -> None:
    """Write a small file for a rank and say so."""
    folder = run.checkpoints / f"000000-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    entry = write_bytes(b"data", folder / f"__{rank}_0.distcp")
    entries = {f"__{rank}_0.distcp": {"size": entry.size, "crc64nvme": entry.crc64nvme}}
    send(peer.sock, {"op": "written", "name": folder.name, "files": entries})


def save(coordinator: Coordinator, run: RunDir, members: list[Peer], step: int) -> str:
    """Have a checkpoint made by good writers; return what all of them are told."""
    fields: dict[str, Any] = {
        "parent": None,
        "world_size": WORLD,
        "topology": {},
        "position": {},
        "code": "",
        "config": "",
    }
    coordinator.expect(Order(name=f"000000-{step:08d}", step=step, began=0.0, fields=fields))
    for rank, member in enumerate(members):
        written(member, run, step, rank)
    answers = [member.next() for member in members]
    assert all(answer is not None for answer in answers)
    return ", ".join(sorted({answer.op for answer in answers if answer is not None}))


def garbage(peer: Peer) -> None:
    peer.sock.sendall(os.urandom(1000).replace(b"\n", b"") + b"\n")


def http(peer: Peer) -> None:
    peer.sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


def no_object(peer: Peer) -> None:
    peer.sock.sendall(b"[1, 2]\n")


def deep(peer: Peer) -> None:
    peer.sock.sendall(b"[" * 200_000 + b"\n")


def no_length(peer: Peer) -> None:
    peer.sock.sendall(b'{"op": "hello", "rank": 0, "blobs": [-1]}\n')


def wrong_token(peer: Peer) -> None:
    peer.hello(1, token="wrong")


def token_beyond_ascii(peer: Peer) -> None:
    peer.hello(1, token="Schlüssel")


def no_token(peer: Peer) -> None:
    send(peer.sock, {"op": "hello", "rank": 1})


def rank_too_great(peer: Peer) -> None:
    peer.hello(WORLD)


def rank_below_0(peer: Peer) -> None:
    peer.hello(-1)


def no_number(peer: Peer) -> None:
    peer.hello("one")


def null_rank(peer: Peer) -> None:
    peer.hello(None)


def infinite_rank(peer: Peer) -> None:
    peer.sock.sendall(b'{"op": "hello", "rank": 1e999, "token": "right", "blobs": []}\n')


def unasked(peer: Peer) -> None:
    send(peer.sock, {"op": "written", "name": "000000-00000001", "files": {}, "rank": 1})


def half_a_line(peer: Peer) -> None:
    peer.sock.sendall(b'{"op": "hel')
    peer.sock.shutdown(socket.SHUT_WR)


ABUSES = [
    *(garbage, http, no_object, deep, no_length, wrong_token, token_beyond_ascii, no_token, rank_too_great),
    *(rank_below_0, no_number, null_rank, infinite_rank, unasked, half_a_line),
]


@pytest.mark.parametrize("abuse", ABUSES)
def test_abuse_is_cut_off_and_saves_go_on(
    abuse: Callable[[Peer], None], coordinator: Coordinator, run: RunDir, peers: list[Peer]
) -> None:
    members = [Peer(coordinator.port).hello(rank) for rank in range(WORLD)]
    peers += members
    assert [frame.op for member in members if (frame := member.next())] == ["welcome"] * WORLD
    stranger = Peer(coordinator.port)
    peers.append(stranger)
    abuse(stranger)
    assert stranger.ended()
    assert save(coordinator, run, members, 1) == "committed"
    assert set(complete_steps(run).values()) == {1}


def test_one_that_says_nothing_is_cut_off_after_a_while(
    coordinator: Coordinator, run: RunDir, peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pctool.checkpoint.coordinator._HELLO_S", 0.2)
    members = [Peer(coordinator.port).hello(rank) for rank in range(WORLD)]
    silent, slow = Peer(coordinator.port), Peer(coordinator.port)
    peers += [*members, silent, slow]
    slow.sock.sendall(b'{"op"')
    assert [frame.op for member in members if (frame := member.next())] == ["welcome"] * WORLD
    assert save(coordinator, run, members, 1) == "committed"  # meanwhile
    assert silent.ended()
    assert slow.ended()


@pytest.mark.parametrize("start", [b"", b'{"op": "hello", "blobs": [100000000]}\n'])
def test_a_stranger_may_not_fill_the_memory(
    start: bytes, coordinator: Coordinator, run: RunDir, peers: list[Peer]
) -> None:
    members = [Peer(coordinator.port).hello(rank) for rank in range(WORLD)]
    stranger = Peer(coordinator.port)
    peers += [*members, stranger]
    assert [frame.op for member in members if (frame := member.next())] == ["welcome"] * WORLD
    with pytest.raises(OSError, match=r"reset|Broken pipe"):
        stranger.sock.sendall(start + b"x" * (100 << 20))
    assert save(coordinator, run, members, 1) == "committed"


def test_a_second_hello_of_a_rank_with_the_right_token_takes_its_place(
    coordinator: Coordinator, run: RunDir, peers: list[Peer]
) -> None:
    """A writer that connects anew: its old connection is no loss when it ends."""
    first = [Peer(coordinator.port).hello(rank) for rank in range(WORLD)]
    assert [frame.op for member in first if (frame := member.next())] == ["welcome"] * WORLD
    again = Peer(coordinator.port).hello(1)
    peers += [*first, again]
    welcome = again.next()
    assert welcome is not None
    first[1].sock.close()
    assert save(coordinator, run, [first[0], again], 1) == "committed"


def test_a_broken_message_of_a_member_fails_the_save_and_no_more(
    coordinator: Coordinator, run: RunDir, peers: list[Peer], said: list[str]
) -> None:
    members = [Peer(coordinator.port).hello(rank) for rank in range(WORLD)]
    peers += members
    assert [frame.op for member in members if (frame := member.next())] == ["welcome"] * WORLD
    send(members[1].sock, {"op": "written", "name": "000000-00000001", "files": {"x": {"size": 1, "no": 2}}})
    assert members[1].ended()
    members[1] = Peer(coordinator.port).hello(1)
    peers.append(members[1])
    assert members[1].next() is not None
    assert save(coordinator, run, members, 2) == "committed"
    assert "the writer of rank 1 is cut off" in said[0]


def test_a_file_name_that_leads_elsewhere_is_no_checkpoints(
    coordinator: Coordinator, run: RunDir, peers: list[Peer]
) -> None:
    members = [Peer(coordinator.port).hello(rank) for rank in range(WORLD)]
    peers += members
    assert [frame.op for member in members if (frame := member.next())] == ["welcome"] * WORLD
    entries = {"../../ledger.jsonl": {"size": 4, "crc64nvme": "AAAAAAAAAAA="}}
    send(members[1].sock, {"op": "written", "name": "000000-00000001", "files": entries})
    assert save(coordinator, run, members, 1) == "failed"
    assert not complete_steps(run)


_CONNECT = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(20)
sock.connect("\\0" + sys.argv[1])
sock.sendall(b'{"op": "coordinate", "blobs": []}\\n')
print(sock.recv(100))
"""


@pytest.mark.root
@pytest.mark.torch
def test_another_users_process_gets_no_writer(tmp_path: Path) -> None:
    gang = Gang(RunDir(tmp_path / "run"), 0, tmp_path, served=True, job={"until": 4})
    gang.start()
    try:
        assert gang.writers is not None
        argv = [
            "setpriv",
            "--reuid",
            "65534",
            "--regid",
            "65534",
            "--clear-groups",
            sys.executable,
            "-S",
            "-c",
            _CONNECT,
        ]
        done = subprocess.run([*argv, gang.writers.address], capture_output=True, text=True, check=False, cwd="/")
        if "No such file" in done.stderr or "Permission denied" in done.stderr:
            pytest.skip(f"nobody cannot start this Python: {done.stderr.strip()}")
        assert done.stdout == "b''\n" or "ConnectionResetError" in done.stderr, done
        assert gang.end() == [0, 0], gang.log()
    finally:
        gang.close()
    assert set(complete_steps(gang.run).values()) == {2, 3, 4}
