"""Train the tiny GPT-2 on two ranks with a PctoolCallback; with `--stop-at` rank 0 asks for a stop after that step."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from framework_harness import ask_to_stop
from hf_small import AtStep, make_trainer, told, weights

from pctool.run import env
from pctool.run.page import Page
from pctool.train.hf import PctoolCallback


def main() -> None:
    torch.set_num_threads(1)
    folder, stop_at = Path(sys.argv[1]), int(sys.argv[2])
    page = Page.open(os.environ[env.PAGE])
    if not stop_at:
        baseline = make_trainer(folder, dataloader_num_workers=1)
        baseline.train()
    trainer = make_trainer(folder, dataloader_num_workers=1)
    trainer.add_callback(PctoolCallback(trainer, every=4))
    if stop_at and trainer.args.process_index == 0:
        trainer.add_callback(AtStep(stop_at, lambda: ask_to_stop(page)))
    trainer.train()
    assert told(trainer) == told(baseline)
    assert all(torch.equal(one, other) for one, other in zip(weights(trainer), weights(baseline), strict=True))
    print(f"rank {trainer.args.process_index} is the same after {trainer.state.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
