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
        self._lock = threading.Lock()  # so that none is started once they are to end
        self._ending = False
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="writers", daemon=True)

    def start(self) -> None:
        """Wait for ranks, in a thread."""
        self._thread.start()

    def close(self) -> None:
        """End the writers at once, whatever they are at: by now the gang has waited for what it wanted."""
        with self._lock:
            self._ending = True
            if self._process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
        self._wake.close()
        if self._thread.ident is not None:
            self._thread.join()
        self._listener.close()
        self._woken.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while not any(key.fileobj is self._woken for key, _ in selector.select()):
                if not self._run():
                    return

    def _run(self) -> bool:
        """Have a server take the ranks for as long as it lives; return False if none can, or is to."""
        with self._lock:
            if self._ending:
                return False
            try:
                self._process = process = self._start()
            except OSError as error:
                self._say(f"the checkpoint writers cannot be started: {error}")
                return False  # ranks say so too, as often as they try
        code = process.wait()
        if process.stdin is not None:
            process.stdin.close()
        if not self._ending:
            self._say(f"the checkpoint writers' server ended with {code}: a new one follows")
        return not self._ending

    def _start(self) -> subprocess.Popen[bytes]:
        config = self._config
        with (config.run.logs(config.attempt) / f"writer-{config.name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "pctool.checkpoint.writer", "--listen", str(self._listener.fileno())],
                pass_fds=(self._listener.fileno(),),
                stdin=subprocess.PIPE,  # its end says that launch has gone
                stdout=log,
                stderr=log,
                env=dict(config.environ),
                start_new_session=True,
            )
