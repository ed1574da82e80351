"""A rank that keeps pctool.train's side of the page without training anything. Arguments: key=value.

steps=N finishes after N steps; save=S takes S seconds to commit on rank 0; fail=R:MODE makes rank R fail at step 5.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from pctool.run.page import Outcome, Page

options = dict(argument.split("=", 1) for argument in sys.argv[1:])
rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
page = Page.open(os.environ["PCTOOL_PAGE"])


def fail(mode: str) -> None:
    if mode == "raise":
        raise ValueError("sample 17 is broken")
    if mode == "comm":
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    if mode == "hang":
        time.sleep(600)
    if mode.isdigit():
        sys.exit(int(mode))
    os.kill(os.getpid(), signal.Signals[mode].value)


def save(step: int) -> None:
    """Commit as rank 0 does: when every node is armed, and slowly if asked to."""
    while not page.may_publish:
        time.sleep(0.005)
    page.report_saving(time.time())
    time.sleep(float(options.get("save", "0")))
    page.report_committed(step)
    page.report_saving(0.0)


def main() -> None:
    print(f"rank {rank} says hello")
    where, _, mode = options.get("fail", "-1:").partition(":")
    step = 0
    while step < int(options.get("steps", "1000000")):
        time.sleep(0.01)
        if local == 0:
            page.report_step(step, time.time())
        if step == 5 and rank == int(where):
            fail(mode)
        if page.stop_requested:
            if rank == 0:
                save(step)
            if local == 0:
                page.report_outcome(Outcome.STOPPED)
            return
        step += 1
    if local == 0:
        page.report_outcome(Outcome.DONE)


main()
