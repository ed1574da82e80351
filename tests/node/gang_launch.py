"""Run one launch with a stand-in for torchrun: python gang_launch.py '{"timing": {...}}' R SCRIPT ARGUMENT..."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace

from pctool.node.actions import Timing
from pctool.node.config import read_config
from pctool.node.launch import Launch


def main() -> int:
    options = json.loads(sys.argv[1])
    config = read_config(
        os.environ,
        per_node=int(sys.argv[2]),
        python=sys.executable,
        script=sys.argv[3:],
        stop_signal=options.get("stop_signal"),
        poll_s=options.get("poll_s", 0.1),
    )
    module = options.get("module", "standin_torchrun")
    config = replace(config, module=module, mirror_module="standin_mirror", timing=Timing(**options.get("timing", {})))
    ports = iter(options["ports"]) if "ports" in options else None
    choose: Callable[[], int] | None = (lambda: next(ports)) if ports is not None else None
    return Launch(
        config,
        emit=lambda text: print(f"pctool launch[{config.name}]: {text}", file=sys.stderr, flush=True),
        free_port=choose,
    ).run()


if __name__ == "__main__":
    sys.exit(main())
