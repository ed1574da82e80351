"""A script that knows nothing of pctool: it saves on a signal of its own choice and has a worker beside it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

asked = False


def on_signal(_signum: int, _frame: object) -> None:
    global asked
    asked = True


worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
signal.signal(signal.SIGUSR2, on_signal)
print("ready")
while not asked:
    time.sleep(0.02)
print("saved on SIGUSR2")
print("worker survived" if worker.poll() is None else "worker died")
worker.kill()
worker.wait()
