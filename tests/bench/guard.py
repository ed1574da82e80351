"""Measure what the stop guard costs: steps a second with it and without, turn by turn in one run.

usage: python tests/bench/guard.py [STEPS] [ROUNDS] [STEP_MS]

A step spins for STEP_MS (1 ms). `plain` is a bare loop over the loader, `steps` the loop of Run.steps without a page,
`guarded` the same with a page: one byte read and the step's number written, each step. One rank, no launcher. Turns are
short and many, and the fastest of each kind are compared: the ones that nothing else on the machine disturbed.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from pctool.run import env
from pctool.run.layout import RunDir
from pctool.run.page import Page
from pctool.train import Run


def spin(seconds: float) -> None:
    """Work for a given time."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def plain(steps: int) -> Iterator[int]:
    """Loop over the loader alone."""
    yield from range(steps)


def steps_of(folder: Path, steps: int, page: Page | None) -> Iterator[object]:
    """Loop through Run.steps, with a page or without. The saves are outside of what is measured."""
    os.environ.pop(env.PAGE, None)
    run_dir = RunDir(folder)
    run_dir.attempt(0).path.mkdir(parents=True)
    os.environ |= {env.RUN_DIR: str(folder), env.ATTEMPT: "0"}
    if page is not None:
        os.environ[env.PAGE] = page.path
    # one step more than is taken: the loop never comes to the save at its end
    return Run(model=torch.nn.Linear(1, 1)).steps(range(steps + 1), until=steps + 1)


def rate(loop: Iterator[object], steps: int, step_s: float) -> float:
    """Return steps a second."""
    next(loop)
    began = time.perf_counter()
    for _ in range(steps - 1):
        spin(step_s)
        next(loop)
    return (steps - 1) / (time.perf_counter() - began)


def main(steps: int, rounds: int, step_s: float) -> None:
    """Print steps a second and ratios as JSON."""
    page = Page.create()
    found: dict[str, list[float]] = {"plain": [], "steps": [], "guarded": []}
    with tempfile.TemporaryDirectory() as name:
        for turn in range(rounds):
            loops: dict[str, Callable[[], Iterator[object]]] = {
                "plain": lambda: plain(steps),
                "steps": lambda turn=turn: steps_of(Path(name, f"steps-{turn}"), steps, None),  # type: ignore[misc]
                "guarded": lambda turn=turn: steps_of(Path(name, f"guarded-{turn}"), steps, page),  # type: ignore[misc]
            }
            for kind, loop in loops.items():
                found[kind].append(rate(loop(), steps, step_s))
    rows = [
        {"loop": kind, "median_steps_per_s": statistics.median(values), "min": min(values), "max": max(values)}
        for kind, values in found.items()
    ]
    pairs = {"guarded/steps": ("guarded", "steps"), "guarded/plain": ("guarded", "plain")}
    ratios = {name: max(found[over]) / max(found[under]) for name, (over, under) in pairs.items()}
    machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps({"machine": machine, "rows": rows, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    given = sys.argv[1:]
    main(
        int(given[0]) if given else 200,
        int(given[1]) if len(given) > 1 else 40,
        float(given[2]) / 1000 if len(given) > 2 else 0.001,
    )
