"""The cluster's fake instance metadata services, in a process of their own: the supervisor forks, so has no threads."""

from __future__ import annotations

import json
import os
import signal
import socket
from datetime import datetime, timezone
from typing import Any, NoReturn

from pctool.errors import SlurmError
from pctool.slurm.private import proc

_ANSWER_S = 10.0  # an answer takes well under a millisecond


class ImdsProcess:
    """Calls the FakeImds in the child: each method of it by name, one JSON line each way."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        supervisor = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                ours.close()
                _serve(theirs, supervisor)
            finally:
                os._exit(70)
        theirs.close()
        ours.settimeout(_ANSWER_S)
        self._socket = ours
        self._lines = ours.makefile("rw", encoding="utf-8")

    def call(self, method: str, node: str, **arguments: Any) -> Any:
        """Call one method of FakeImds; raise SlurmError if the child is gone or the method refused."""
        try:
            self._lines.write(json.dumps([method, node, arguments]) + "\n")
            self._lines.flush()
            answer = json.loads(self._lines.readline() or '["error", "its process has ended"]')
        except (OSError, ValueError) as error:
            raise SlurmError(f"the fake instance metadata service does not answer: {error}") from None
        if answer[0] != "ok":
            raise SlurmError(f"the fake instance metadata service refused {method} for {node}: {answer[1]}")
        return answer[1]


def _serve(connection: socket.socket, supervisor: int) -> NoReturn:
    from pctool.aws.fake_imds import FakeImds

    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    proc.die_with_parent(signal.SIGKILL, supervisor)
    proc.set_name("fake-imds")
    service = FakeImds()
    lines = connection.makefile("rw", encoding="utf-8")
    for line in lines:
        method, node, arguments = json.loads(line)
        if "when" in arguments:
            arguments["when"] = datetime.fromtimestamp(arguments["when"], timezone.utc)
        try:
            answer = ["ok", getattr(service, method)(node, **arguments)]
        except (KeyError, ValueError, OSError) as error:
            answer = ["error", f"{type(error).__name__}: {error}"]
        lines.write(json.dumps(answer) + "\n")
        lines.flush()
    os._exit(0)
