"""The checkpoint writers of a node, as its launch sees them: a server that is started when a rank first asks for it.

Launch holds the socket, and hands it to the server; a script that never saves costs nothing, and should the server be
killed, the next rank that connects finds a new one.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from pctool.node.config import LaunchConfig

_BACKLOG = 128


class Writers:
    """The writers of one node. `say` may be called in another thread."""

    def __init__(self, config: LaunchConfig, *, say: Callable[[str], None]) -> None:
        self.address = f"pctool-writers-{secrets.token_hex(16)}"
        self._config = config
        self._say = say
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(_BACKLOG)
        self._process: subprocess.Popen[bytes] | None = None
        self._closing, self._closed = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="writers", daemon=True)

    def start(self) -> None:
        """Wait for ranks, in a thread."""
        self._thread.start()

    def close(self) -> None:
        """End the writers at once, whatever they are at: by now the gang has waited for what it wanted."""
        os.close(self._closed)
        if self._thread.ident is not None:
            self._thread.join()
        self._listener.close()
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._closing, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while not any(key.fileobj == self._closing for key, _ in selector.select()):
                if not self._run(selector):
                    break
        os.close(self._closing)

    def _run(self, selector: selectors.BaseSelector) -> bool:
        """Have a server take the ranks for as long as it lives; return False once it is time to close."""
        try:
            process = self._start()
        except OSError as error:
            self._say(f"the checkpoint writers cannot be started: {error}")
            return False  # ranks say so too, as often as they try
        self._process = process
        pidfd = os.pidfd_open(process.pid)
        try:
            with selectors.DefaultSelector() as waiting:
                waiting.register(self._closing, selectors.EVENT_READ)
                waiting.register(pidfd, selectors.EVENT_READ)
                if any(key.fileobj == self._closing for key, _ in waiting.select()):
                    return False
        finally:
            os.close(pidfd)
        self._say(f"the checkpoint writers' server ended with {process.wait()}: a new one follows")
        return True

    def _start(self) -> subprocess.Popen[bytes]:
        config = self._config
        with (config.run.logs(config.attempt) / "writer.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "pctool.checkpoint.writer", "--listen", str(self._listener.fileno())],
                pass_fds=(self._listener.fileno(),),
                stdin=subprocess.PIPE,  # its end says that launch has gone
                stdout=log,
                stderr=log,
                env=dict(config.environ),
                start_new_session=True,
            )
