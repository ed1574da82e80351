"""The process behind one private cluster: munged, slurmctld, the nodes, their deaths and what EC2 and clustermgtd do.

One thread, one selector: Slurm's power programs (a pipe), the control socket (JSON lines), signals, and timers.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from pctool.errors import PctoolError, SlurmError
from pctool.slurm.private.config import ClusterConfig
from pctool.slurm.private.control import Control
from pctool.slurm.private.daemons import Daemons
from pctool.slurm.private.fleet import Fleet
from pctool.slurm.private.timers import Timers


class Supervisor:
    """Owns every part of one cluster; `run` returns when it is told to end."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.timers = Timers()
        self.selector = selectors.DefaultSelector()
        self.ending = False
        self.daemons = Daemons(config)
        self.fleet = Fleet(config, self.daemons, self.timers)
        self.control = Control(self.fleet, self.selector, self._end)

    def start(self) -> None:
        """Bring the cluster up; raise SlurmError with the daemon's own words if that fails."""
        self._catch_signals()
        self.daemons.write_files()
        self._open_power_pipe()
        self.daemons.start_controller()
        self.fleet.start()
        self.control.listen(self.config.folder / "control")
        if self.config.booted:
            self.fleet.boot_all()
            self.daemons.wait_for_nodes(list(self.fleet.nodes), self._poll_booting)

    def run(self) -> None:
        """Serve until told to end."""
        while not self.ending:
            self._poll(None)

    def _poll(self, timeout: float | None) -> None:
        """Wait for one round of events, at most `timeout` seconds or until the next timer, and handle them."""
        waits = [wait for wait in (timeout, self.timers.next_in()) if wait is not None]
        for key, _ in self.selector.select(min(waits) if waits else None):
            self._guarded(key.data)
        for action in self.timers.due():
            self._guarded(action)

    def _poll_booting(self, timeout: float) -> None:
        self._poll(timeout)
        lost = [node.name for node in self.fleet.nodes.values() if node.state == "dead"]
        if lost:
            raise SlurmError(f"node {lost[0]} did not start: {self.daemons.tail(lost[0])}")

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run one handler; where Slurm refuses or does not answer that is logged, and the cluster goes on."""
        try:
            action()
        except SlurmError as error:
            _log(str(error))

    def _end(self) -> None:
        self.ending = True

    def _catch_signals(self) -> None:
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        reader.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._end())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._wakeups = (reader, writer)
        self.selector.register(reader, selectors.EVENT_READ, self._woken)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakeups[0].recv(4096)
        self.fleet.reap()

    def _open_power_pipe(self) -> None:
        path = self.daemons.layout.power
        os.mkfifo(path, 0o600)
        self._power_pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # read-write: it never sees an end of file
        self._power_text = b""
        self.selector.register(self._power_pipe, selectors.EVENT_READ, self._power_asked)

    def _power_asked(self) -> None:
        self._power_text += os.read(self._power_pipe, 65536)
        *lines, self._power_text = self._power_text.split(b"\n")
        for line in lines:  # each by itself: slurmctld does not ask again, so one that fails must cost no other
            self._guarded(partial(self._power, line.decode()))

    def _power(self, line: str) -> None:
        verb, _, nodes = line.partition(" ")
        _log(f"slurmctld asks to {verb} {nodes}")
        self.fleet.power(verb, self.daemons.expand(nodes))


def _log(text: str) -> None:
    """Write to supervisor.log, which is this process's standard error."""
    sys.stderr.write(f"{time.time():.3f} {text}\n")
    sys.stderr.flush()


def serve(config: ClusterConfig, report: Callable[[dict[str, Any]], None]) -> None:
    """Run one cluster: report that it is ready, or why not, and then serve until the end."""
    try:
        supervisor = Supervisor(config)
        supervisor.start()
    except PctoolError as error:
        report({"error": error.what, "where": error.where, "fix": error.fix})
        return
    except Exception:  # noqa: BLE001  the report is the only way out of this process: nothing may be lost
        report({"error": f"the private cluster's supervisor failed:\n{traceback.format_exc()}"})
        return
    report({"ready": True, **supervisor.daemons.facts()})
    supervisor.run()
