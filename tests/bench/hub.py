"""Measure the hub of the stop channel alone: N connections, held by one other process that beats and acknowledges.

    python tests/bench/hub.py [--nodes 1000] [--idle-s 20] [--json]

Measured: seconds and CPU until all have joined (handshake included), the hub's CPU while idle as a share of one core,
and seconds and CPU from a stop until all acknowledgements are back.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import selectors
import socket
import time
from typing import Any

from pctool.node import wire
from pctool.node.hub import Hub, HubEvent, Joined

NONCE = "bench"


def join(port: int, node: int) -> socket.socket:
    """Open one connection as a peer does."""
    sock = socket.create_connection(("127.0.0.1", port))
    line = b""
    while not line.endswith(b"\n"):
        line += sock.recv(1)
    told = wire.proof(NONCE, "peer", wire.decode(line)["challenge"], node, "c")
    sock.sendall(wire.encode({"node": node, "challenge": "c", "proof": told}))
    sock.setblocking(False)
    return sock


def peers(port: int, nodes: int) -> None:
    """Be all peers: beat, and acknowledge a stop."""
    selector = selectors.DefaultSelector()
    socks = [join(port, node) for node in range(1, nodes)]
    for sock in socks:
        selector.register(sock, selectors.EVENT_READ)
    next_beat = time.monotonic()
    while True:
        for key, _ in selector.select(0.05):
            ready = key.fileobj
            assert isinstance(ready, socket.socket)
            data = ready.recv(65536)
            if not data:
                return
            if b'"stop"' in data:
                ready.send(wire.encode({"type": "armed"}))
        if time.monotonic() >= next_beat:
            next_beat += wire.BEAT_S
            for sock in socks:
                sock.send(wire.encode(wire.BEAT))


def measure(nodes: int, idle_s: float) -> dict[str, Any]:
    """Measure one size."""
    joined: list[HubEvent] = []
    said: list[HubEvent] = []
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    hub = Hub(
        listener,
        nonce=NONCE,
        nodes=nodes,
        deliver=lambda event: (joined if isinstance(event, Joined) else said).append(event),
    )
    other = multiprocessing.Process(target=peers, args=(listener.getsockname()[1], nodes), daemon=True)
    other.start()
    began, cpu = time.perf_counter(), time.process_time()
    hub.start()
    _wait(joined, nodes - 1)
    join_s, join_cpu_s = time.perf_counter() - began, time.process_time() - cpu
    cpu = time.process_time()
    time.sleep(idle_s)
    idle = (time.process_time() - cpu) / idle_s
    began, cpu = time.perf_counter(), time.process_time()
    hub.broadcast({"type": "stop", "why": "notice", "node": "n1", "deadline": time.time() + 120})
    _wait(said, nodes - 1)
    row = {
        "nodes": nodes,
        "join_s": round(join_s, 3),
        "join_cpu_s": round(join_cpu_s, 3),
        "idle_core_percent": round(idle * 100, 2),
        "stop_to_all_acks_s": round(time.perf_counter() - began, 3),
        "stop_to_all_acks_cpu_s": round(time.process_time() - cpu, 3),
    }
    other.kill()
    other.join()
    hub.close()
    return row


def _wait(events: list[HubEvent], count: int) -> None:
    deadline = time.monotonic() + 120
    while len(events) < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"only {len(events)} of {count}")
        time.sleep(0.001)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure the hub of the stop channel.")
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--idle-s", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = [measure(nodes, args.idle_s) for nodes in args.nodes]
    machine = {"system": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()}
    answer = {"machine": machine, "rows": rows, "ratios": {}}
    print(json.dumps(answer) if args.json else "\n".join(map(str, rows)))


if __name__ == "__main__":
    main()
