"""The launches' channel on real sockets: who gets in, what arrives, and how a loss is told."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from pctool.errors import UsageError
from pctool.node import wire
from pctool.node.hub import Gone, Hub, HubEvent, Joined, Said, listen
from pctool.node.peer import HubGone, HubJoined, HubSaid, Peer, PeerEvent
from pctool.node.trouble import NodeTroubleError

NONCE = "0123456789abcdef"


class Bench:
    """A hub and any number of peers, closed at the end."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.heard: queue.Queue[HubEvent] = queue.Queue()

    def hub(self, *, nodes: int, port: int = 0, silence_s: float = 20.0, beat_s: float = 2.0) -> tuple[Hub, int]:
        listener = listen("127.0.0.1", port) if port else socket.create_server(("127.0.0.1", 0), backlog=1024)
        at = listener.getsockname()[1]
        hub = Hub(listener, nonce=NONCE, nodes=nodes, deliver=self.heard.put, silence_s=silence_s, beat_s=beat_s)
        hub.start()
        self.stack.callback(hub.close)
        return hub, at

    def peer(
        self, port: int, node: int, *, nonce: str = NONCE, join_s: float = 20.0, silence_s: float = 20.0
    ) -> tuple[Peer, queue.Queue[PeerEvent]]:
        events: queue.Queue[PeerEvent] = queue.Queue()
        peer = Peer("127.0.0.1", port, nonce=nonce, node=node, deliver=events.put, join_s=join_s, silence_s=silence_s)
        peer.start()
        self.stack.callback(peer.close)
        return peer, events

    def next(self) -> HubEvent:
        return self.heard.get(timeout=20)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack)


def soon(events: queue.Queue[PeerEvent]) -> PeerEvent:
    return events.get(timeout=20)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_messages_go_both_ways_in_order(bench: Bench) -> None:
    hub, port = bench.hub(nodes=3)
    first, told_first = bench.peer(port, 1)
    first.send({"type": "ready", "n": 0})  # before it is connected: kept until it is
    for n in range(1, 100):
        first.send({"type": "x", "n": n})
    assert bench.next() == Joined(1)
    got = [bench.next() for _ in range(100)]
    assert [e.message["n"] for e in got if isinstance(e, Said)] == list(range(100))
    _, told_second = bench.peer(port, 2)
    assert bench.next() == Joined(2)
    hub.broadcast({"type": "stop"})
    hub.send(2, {"type": "only two"})
    hub.send(1, {"type": "end"})
    assert isinstance(soon(told_first), HubJoined)
    assert isinstance(soon(told_second), HubJoined)
    assert [soon(told_first), soon(told_first)] == [HubSaid({"type": "stop"}), HubSaid({"type": "end"})]
    assert [soon(told_second), soon(told_second)] == [HubSaid({"type": "stop"}), HubSaid({"type": "only two"})]


def test_a_large_burst_arrives_whole(bench: Bench) -> None:
    hub, port = bench.hub(nodes=2)
    peer, told = bench.peer(port, 1)
    assert bench.next() == Joined(1)
    payload = {"type": "big", "text": "x" * 60000}
    for _ in range(10):
        hub.send(1, payload)
        peer.send(payload)
    assert isinstance(soon(told), HubJoined)
    assert [soon(told) for _ in range(10)] == [HubSaid(payload)] * 10
    assert [bench.next() for _ in range(10)] == [Said(1, payload)] * 10


def test_a_peer_with_a_wrong_nonce_is_never_let_in(bench: Bench) -> None:
    _, port = bench.hub(nodes=3)
    _, told = bench.peer(port, 1, nonce="wrong", join_s=0.5)
    event = soon(told)
    assert isinstance(event, HubGone)
    assert "no hub" in event.why
    bench.peer(port, 2)
    assert bench.next() == Joined(2)  # the first event of all: the stranger made none
    assert bench.heard.empty()


@pytest.mark.parametrize("node", [0, 3, -1, None, "1", True])
def test_a_node_number_outside_the_gang_is_refused(bench: Bench, node: object) -> None:
    _, port = bench.hub(nodes=3)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock, sock.makefile("rb") as stream:
        hello = wire.decode(stream.readline())
        told = wire.proof(NONCE, "peer", hello["challenge"], node, "c")
        sock.sendall(wire.encode({"node": node, "challenge": "c", "proof": told}))
        assert stream.readline() == b""
    assert bench.heard.empty()


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 5000,
        b'{"node":1,"proof":"x"}\n',
        b"[]\n",
        b'{"node":1,"challenge":"x","proof":"\\ud800"}\n',  # no UTF-8 can be made of it
        b'{"node":1,"challenge":"x","proof":"\xc3\xa9"}\n',
    ],
)
def test_noise_from_strangers_is_dropped_and_disturbs_nobody(bench: Bench, noise: bytes) -> None:
    hub, port = bench.hub(nodes=2)
    _, told = bench.peer(port, 1)
    assert bench.next() == Joined(1)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(noise)
        with suppress(ConnectionResetError):  # closed without a reset is as good
            while sock.recv(4096):
                pass
    hub.broadcast({"type": "stop"})
    assert isinstance(soon(told), HubJoined)
    assert soon(told) == HubSaid({"type": "stop"})
    assert bench.heard.empty()


def test_whatever_goes_wrong_with_one_connection_ends_only_that_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, port = bench.hub(nodes=3)
    _, told = bench.peer(port, 1)
    assert isinstance(soon(told), HubJoined)
    monkeypatch.setattr(wire, "proved", lambda _message, _expected: [][0])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock, sock.makefile("rb") as stream:
        stream.readline()
        sock.sendall(b'{"node":2,"challenge":"x","proof":"y"}\n')
        assert stream.readline() == b""
    hub.broadcast({"type": "stop"})
    assert soon(told) == HubSaid({"type": "stop"})


@pytest.mark.parametrize("answer", [b'{"proof":"\\ud800"}\n', b'{"proof":"\xc3\xa9"}\n'])
def test_a_foreign_service_cannot_end_a_peers_search(bench: Bench, answer: bytes) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as foreign:
        _, told = bench.peer(port, 1)
        sock, _ = foreign.accept()
        with sock:
            sock.sendall(b'{"pctool":1,"challenge":"x"}\n' + answer)
            sock.recv(4096)
    _, at = bench.hub(nodes=2, port=port)
    assert soon(told) == HubJoined(f"127.0.0.1:{at}")


def test_a_challenge_answered_for_another_connection_does_not_let_in(bench: Bench) -> None:
    _, port = bench.hub(nodes=3)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as one,
        socket.create_connection(("127.0.0.1", port), timeout=20) as two,
        one.makefile("rb") as first,
        two.makefile("rb") as stream,
    ):
        hello = wire.decode(first.readline())
        stream.readline()
        told = wire.proof(NONCE, "peer", hello["challenge"], 1, "c")
        two.sendall(wire.encode({"node": 1, "challenge": "c", "proof": told}))
        assert stream.readline() == b""


def test_many_silent_strangers_do_not_keep_a_peer_out(bench: Bench) -> None:
    _, port = bench.hub(nodes=2)
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
        bench.peer(port, 1)
        assert bench.next() == Joined(1)


def test_a_taken_port_moves_the_hub_on_and_the_peers_follow(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # it takes connections and never says a word
        wanted = taken.getsockname()[1]
        _, port = bench.hub(nodes=2, port=wanted)
        assert port > wanted
        _, told = bench.peer(wanted, 1)
        assert soon(told) == HubJoined(f"127.0.0.1:{port}")


def test_a_foreign_hub_on_the_port_is_passed_by(bench: Bench) -> None:
    port = free_port()
    foreign: queue.Queue[HubEvent] = queue.Queue()
    other = Hub(listen("127.0.0.1", port), nonce="another run's", nodes=2, deliver=foreign.put)
    other.start()
    bench.stack.callback(other.close)
    _, at = bench.hub(nodes=2, port=port)
    _, told = bench.peer(port, 1)
    assert soon(told) == HubJoined(f"127.0.0.1:{at}")
    assert foreign.empty()


def test_an_address_that_is_not_ours_is_bad_input() -> None:
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1"):
        listen("192.0.2.1", 4000)


def test_a_name_without_an_address_and_ports_that_are_all_taken_are_troubles_of_the_node(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = free_port()
    for port in range(first, min(first + wire.PORTS, 65536)):
        with suppress(OSError):  # another program has it: as good
            bench.stack.enter_context(socket.create_server(("127.0.0.1", port)))
    with pytest.raises(NodeTroubleError, match="all taken"):
        listen("127.0.0.1", first)

    def unresolved(*_args: object, **_kwargs: object) -> socket.socket:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "create_server", unresolved)
    with pytest.raises(NodeTroubleError, match="Temporary failure"):
        listen("n0", 4000)


def test_the_hub_may_come_late(bench: Bench) -> None:
    port = free_port()
    _, told = bench.peer(port, 1)
    with pytest.raises(queue.Empty):
        told.get(timeout=0.3)
    bench.hub(nodes=2, port=port)
    assert isinstance(soon(told), HubJoined)


def test_closing_ends_a_search_at_once(bench: Bench) -> None:
    peer, told = bench.peer(free_port(), 1, join_s=3600)
    peer.close()
    assert not peer._thread.is_alive()
    assert told.empty()


def test_a_peer_that_comes_again_replaces_itself_and_is_not_lost(bench: Bench) -> None:
    hub, port = bench.hub(nodes=2)
    bench.peer(port, 1)
    assert bench.next() == Joined(1)
    _, told = bench.peer(port, 1)
    assert bench.next() == Joined(1)
    hub.broadcast({"type": "stop"})
    assert isinstance(soon(told), HubJoined)
    assert soon(told) == HubSaid({"type": "stop"})
    assert bench.heard.empty()


PEER_PROCESS = """
import sys, time
from pctool.node.peer import Peer
peer = Peer("127.0.0.1", int(sys.argv[1]), nonce=sys.argv[2], node=1, deliver=lambda event: None, join_s=20)
peer.start()
time.sleep(600)
"""

HUB_PROCESS = """
import sys, time
from pctool.node.hub import Hub, listen
hub = Hub(listen("127.0.0.1", int(sys.argv[1])), nonce=sys.argv[2], nodes=2, deliver=lambda event: None)
hub.start()
time.sleep(600)
"""

Starter = Callable[[str, int], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Starter]:
    started: list[subprocess.Popen[bytes]] = []

    def go(code: str, port: int) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", code, str(port), NONCE]))
        return started[-1]

    yield go
    for process in started:
        process.kill()
        process.wait()


def test_a_killed_peer_is_lost_at_once(bench: Bench, start: Starter) -> None:
    _, port = bench.hub(nodes=2, silence_s=3600)
    process = start(PEER_PROCESS, port)
    assert bench.next() == Joined(1)
    process.kill()
    event = bench.next()
    assert isinstance(event, Gone)
    assert "connection" in event.why


def test_a_peer_that_says_nothing_any_more_is_lost_by_silence(bench: Bench, start: Starter) -> None:
    """A stopped process is as silent as a machine without power: the kernel's connection stays, nobody answers."""
    _, port = bench.hub(nodes=2, silence_s=1.0, beat_s=0.2)
    process = start(PEER_PROCESS, port)
    assert bench.next() == Joined(1)
    os.kill(process.pid, signal.SIGSTOP)
    assert bench.next() == Gone(1, "silent for 1 s")


def test_a_peer_that_only_beats_is_not_lost(bench: Bench) -> None:
    _, port = bench.hub(nodes=2, silence_s=3.0)
    bench.peer(port, 1)
    assert bench.next() == Joined(1)
    with pytest.raises(queue.Empty):
        bench.heard.get(timeout=4.0)


def test_a_killed_hub_is_lost_at_once(bench: Bench, start: Starter) -> None:
    port = free_port()
    process = start(HUB_PROCESS, port)
    _, told = bench.peer(port, 1, silence_s=3600)
    assert isinstance(soon(told), HubJoined)
    process.kill()
    event = soon(told)
    assert isinstance(event, HubGone)
    assert "connection" in event.why


def test_a_silent_hub_is_lost_by_silence(bench: Bench, start: Starter) -> None:
    port = free_port()
    process = start(HUB_PROCESS, port)
    _, told = bench.peer(port, 1, silence_s=1.0)
    assert isinstance(soon(told), HubJoined)
    os.kill(process.pid, signal.SIGSTOP)
    assert soon(told) == HubGone("silent for 1 s")


def test_what_was_sent_before_closing_arrives(bench: Bench) -> None:
    hub, port = bench.hub(nodes=2)
    peer, told = bench.peer(port, 1)
    assert bench.next() == Joined(1)
    hub.broadcast({"type": "release"})
    hub.close()
    assert isinstance(soon(told), HubJoined)
    assert soon(told) == HubSaid({"type": "release"})
    assert isinstance(soon(told), HubGone)
    peer.close()


def test_300_peers_are_served(bench: Bench) -> None:
    hub, port = bench.hub(nodes=301)
    peers = [bench.peer(port, node) for node in range(1, 301)]
    joined = {bench.next() for _ in peers}
    assert joined == {Joined(node) for node in range(1, 301)}
    hub.broadcast({"type": "stop"})
    for _, told in peers:
        assert isinstance(soon(told), HubJoined)
        assert soon(told) == HubSaid({"type": "stop"})
