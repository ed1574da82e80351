"""A torchrun without torch, where torch would add nothing but seconds: same arguments, same processes, same exception.

Rank processes get torchrun's environment and sessions of their own; node 0 holds the rendezvous port.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass


@dataclass
class Failure:
    exitcode: int
    timestamp: int


class ChildFailedError(Exception):
    def __init__(self, failures: dict[int, Failure]) -> None:
        super().__init__("ranks failed")
        self.failures = failures


class SignalException(Exception):  # noqa: N818 (torch's name)
    pass


def on_sigterm(_signum: int, _frame: object) -> None:
    raise SignalException("got a SIGTERM")


def start(args: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    ranks = []
    for local in range(args.nproc_per_node):
        rank = args.node_rank * args.nproc_per_node + local
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(args.nnodes * args.nproc_per_node),
            "MASTER_ADDR": args.master_addr,
            "MASTER_PORT": str(args.master_port),
        }
        command = [sys.executable, "-u", *args.command]
        ranks.append(subprocess.Popen(command, env=env, start_new_session=True))
    return ranks


def watch(args: argparse.Namespace, ranks: list[subprocess.Popen[bytes]]) -> None:
    while True:
        codes = [rank.poll() for rank in ranks]
        bad = {args.node_rank * len(ranks) + i: code for i, code in enumerate(codes) if code}
        if bad:
            raise ChildFailedError({rank: Failure(code, int(time.time())) for rank, code in bad.items()})
        if all(code == 0 for code in codes):
            return
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--nnodes", "--node-rank", "--nproc-per-node", "--master-port", "--max-restarts"):
        parser.add_argument(name, type=int)
    for name in ("--master-addr", "--rdzv-id"):
        parser.add_argument(name)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, on_sigterm)
    store = None
    if args.node_rank == 0:
        try:
            store = socket.create_server((args.master_addr, args.master_port))
        except OSError as error:
            raise RuntimeError(f"The server socket has failed to listen. code: EADDRINUSE, {error}") from error
    ranks = start(args)
    try:
        watch(args, ranks)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGTERM)
            rank.wait()
        if store is not None:
            store.close()


if __name__ == "__main__":
    main()
