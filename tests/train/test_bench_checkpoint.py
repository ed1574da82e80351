"""The benchmark of checkpoints runs to its end and says all that it is asked for; what it measures is not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = Path(__file__).parents[1] / "bench" / "checkpoint.py"
ASKED = {"stall", "durable", "restore", "mirror", "memory", "throughput", "stall_dcp_async", "durable_dcp_async"}


def test_it_measures_everything_once_small(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--quick", "--json", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["ratios"].keys() >= ASKED
    assert all(value > 0 for value in answer["ratios"].values())
    assert {"ours: stall, first save", "torch.save + fsync", "dcp.load, warm"} <= {row["row"] for row in answer["rows"]}
    assert list(tmp_path.iterdir()) == []
