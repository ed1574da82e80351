"""Fit the small module on two ranks with a PctoolCallback; with a step, rank 0 asks for a stop after that one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from framework_harness import ask_to_stop
from lightning_small import AtStep, fit, make_trainer, same

from pctool.run import env
from pctool.run.page import Page
from pctool.train.lightning import PctoolCallback


def main() -> None:
    torch.set_num_threads(1)
    folder, stop_at = Path(sys.argv[1]), int(sys.argv[2])
    page, rank = Page.open(os.environ.pop(env.PAGE)), int(os.environ["RANK"])
    ranks = {"strategy": "ddp", "devices": 2}
    if not stop_at:
        # as a run of its own, since pctool sees to the order of the samples
        run, attempt = os.environ.pop(env.RUN_DIR), os.environ.pop(env.ATTEMPT)
        whole = fit(make_trainer(folder, PctoolCallback(run_dir=str(folder / "whole")), **ranks), workers=1)
        os.environ |= {env.RUN_DIR: run, env.ATTEMPT: attempt}
    os.environ[env.PAGE] = page.path
    stop = [AtStep(stop_at, lambda: ask_to_stop(page))] if rank == 0 else []
    model = fit(make_trainer(folder, PctoolCallback(every=3), *stop, **ranks), workers=1)
    assert model.losses.items() <= whole.losses.items()
    assert same(model, whole)
    print(f"rank {rank} is the same after {len(model.losses)} more batches", flush=True)


if __name__ == "__main__":
    main()
