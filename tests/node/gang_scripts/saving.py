"""Train with `Checkpointer` until told to end: saving.py STEPS FOLDER. A rank dies when FOLDER/die-<rank> appears."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from pctool.checkpoint import Checkpointer

steps, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo")
weights = {f"w{dist.get_rank()}": torch.zeros(1000)}
checkpointer = Checkpointer(every=1)
restored = checkpointer.restore(weights)
for step in range(restored.step + 1 if restored else 1, steps + 1):
    weights[f"w{dist.get_rank()}"] += 1
    checkpointer.save(weights, step)
    (folder / f"copied-{dist.get_rank()}").write_text(str(step))
    while not (folder / f"go-{step}").exists():
        if (folder / f"die-{dist.get_rank()}").exists():
            os._exit(9)
        time.sleep(0.01)
checkpointer.save_last(weights, steps)
checkpointer.close()
dist.destroy_process_group()
