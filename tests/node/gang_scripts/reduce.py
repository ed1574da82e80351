"""All-reduce N times over gloo; rank 1 may raise or exit in the middle."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

times, mode = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} of {dist.get_world_size()}")
value = torch.ones(100)
for count in range(times):
    dist.all_reduce(value)
    if count == 3:
        print("reduced")
    if count == 10 and dist.get_rank() == 1:
        if mode == "raise":
            raise ValueError("sample 17 is broken")
        if mode == "exit":
            sys.exit(7)
    time.sleep(0.01)
dist.destroy_process_group()
