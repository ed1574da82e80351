"""TCP ports for the daemons of one cluster, free now and not taken by another cluster before they are used.

A port counts as free when it can be bound, and is reserved by a name in Linux's abstract socket namespace, which the
kernel gives back when its holder ends, however that happens. Ports are taken below the ephemeral range: a port in it
may become some connection's source port while its node is down, and the node could then not boot again.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

from pctool.errors import SlurmError

_LOWEST = 15000
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Ports:
    """The ports one cluster holds, until `close` or the end of the process."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def take(self, count: int) -> list[int]:
        """Reserve `count` free ports and return them in rising order; raise SlurmError when there are not enough."""
        low, high = _LOWEST, _ephemeral_start()
        start = random.randrange(low, high)
        taken: list[int] = []
        for port in [*range(start, high), *range(low, start)] if count <= high - low else ():
            if self._reserve(port):
                taken.append(port)
            if len(taken) == count:
                return sorted(taken)
        self.close()
        raise SlurmError(
            f"there are no {count} free TCP ports between {low} and {high}",
            fix="end other private clusters (`pctool local status`), or use fewer nodes",
        )

    def _reserve(self, port: int) -> bool:
        name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            name.bind(f"\0pctool-port-{port}")
        except OSError:
            name.close()
            return False
        if not _bindable(port):
            name.close()
            return False
        self._held.append(name)
        return True

    def close(self) -> None:
        """Give all ports back."""
        for name in self._held:
            name.close()
        self._held.clear()


def _bindable(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _ephemeral_start() -> int:
    try:
        return max(_LOWEST + 2000, int(_RANGE_FILE.read_text().split()[0]))
    except (OSError, ValueError, IndexError):
        return 32768  # Linux's default
