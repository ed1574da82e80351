"""The control socket of a private cluster: one JSON object a line each way.

A request is `{"op": ..., ...}`, its answer `{"ok": true, "result": ...}` or `{"ok": false, "error": ..., "code": ...}`.
"""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pctool.errors import PctoolError, SlurmError
from pctool.slurm.private.fleet import Fleet

_MAX_LINE = 1 << 20


class Control:
    """Answers requests one at a time, in the supervisor's own thread."""

    def __init__(self, fleet: Fleet, selector: selectors.BaseSelector, end: Callable[[], None]) -> None:
        self._fleet = fleet
        self._selector = selector
        self._end = end
        self._operations: dict[str, Callable[[dict[str, Any]], Any]] = {
            "notice": self._notice,
            "clear": lambda request: fleet.clear(request["node"]),
            "rebalance": lambda request: fleet.rebalance(request["node"]),
            "imds_fault": lambda request: fleet.imds_fault(request["node"], request["mode"]),
            "kill": self._kill,
            "env": lambda request: fleet.set_env(request["node"], request["env"]),
            "boot": lambda request: fleet.set_boot(request["delay"], request["fail"]),
            "processes": lambda request: fleet.processes(request["node"], request["job"]),
            "status": lambda request: fleet.status(),
            "down": lambda request: end(),
        }

    def listen(self, path: Path) -> None:
        """Serve on a Unix socket that only its owner may open."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(16)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(5.0)  # for answers to a client that does not read
        received = bytearray()
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(connection, received))

    def _read(self, connection: socket.socket, received: bytearray) -> None:
        try:
            data = connection.recv(65536)
            received += data
            if not data or len(received) > _MAX_LINE:
                self._close(connection)
                return
            while b"\n" in received:
                line, _, rest = bytes(received).partition(b"\n")
                received[:] = rest
                connection.sendall(json.dumps(self._answer(line)).encode() + b"\n")
        except OSError:  # the client has gone; its request was carried out
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            operation = self._operations[request["op"]]
            return {"ok": True, "result": operation(request)}
        except PctoolError as error:
            return {"ok": False, "error": error.what, "fix": error.fix, "code": error.exit_code}
        except (KeyError, TypeError, ValueError) as error:
            return {"ok": False, "error": f"bad request {line[:200]!r}: {type(error).__name__}: {error}", "code": 2}
        except OSError as error:  # a full disk, no process to be had; `_read` would take it for a client that has gone
            return {"ok": False, "error": f"{request['op']!r} failed: {error}", "code": SlurmError.exit_code}

    def _notice(self, request: dict[str, Any]) -> float:
        return self._fleet.notice(
            request["node"],
            lead_s=request["lead_s"],
            action=request["action"],
            die=request["die"],
            down=request["down_after"],
            replace=request["replace_after"],
        )

    def _kill(self, request: dict[str, Any]) -> None:
        self._fleet.kill(request["node"], down=request["down_after"], replace=request["replace_after"])
