"""Every scenario once, on the example, on real private Slurms: one baseline, then two rehearsals side by side."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pctool.rehearsal.scenarios import SCENARIOS

ROOT = Path(__file__).resolve().parents[2]
JOB, CLUSTER = ROOT / "docs/examples/tinygpt/job.toml", ROOT / "cluster-configs/p5-spot.yaml"
# with spare nodes no restart waits for a new instance, which slurmctld lets a job see in a round of 30 s at any scale
SHAPE = ("-N", "2", "--ranks-per-node", "2", "--spare-nodes", "2", "--time-scale", "0.1")
SIDE_BY_SIDE = 2  # a scenario mostly waits for Slurm; more of them would make two cores the bottleneck

# the fixture runs them all; a scenario that hangs is ended by its own limit
pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.timeout(2400)]


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "pctool", "rehearse", str(JOB), "--cluster", str(CLUSTER), *SHAPE, "--json"]
    log = (folder.parent / f"{folder.name}.log").open("w")
    with log:
        return subprocess.Popen([*argv, "--folder", str(folder), *flags], stdout=subprocess.PIPE, stderr=log, text=True)


def finish(*processes: subprocess.Popen[str]) -> dict[str, dict[str, Any]]:
    """Wait for them all, so that none is left behind, and return their verdicts."""
    printed = [process.communicate()[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert set(codes) <= {0, 1}, f"rehearse exited with {codes}"
    return {verdict["scenario"]: verdict for text in printed for verdict in json.loads(text)["verdicts"]}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("rehearsal")
    found = finish(start(folder / "first", "--scenario", "notice"))
    rest = [name for name in SCENARIOS if name != "notice"]
    baseline = str(folder / "first" / "baseline")
    processes = [
        start(
            folder / f"part{part}", "--baseline", baseline, *(f"--scenario={name}" for name in rest[part::SIDE_BY_SIDE])
        )
        for part in range(SIDE_BY_SIDE)
    ]
    return found | finish(*processes)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_passes(name: str, verdicts: dict[str, dict[str, Any]]) -> None:
    assert verdicts[name]["passed"], verdicts[name]["why"]


def test_a_notice_loses_no_step_and_changes_no_number(verdicts: dict[str, dict[str, Any]]) -> None:
    notice = verdicts["notice"]
    assert notice["steps_lost"] == 0
    assert (notice["losses_equal"], notice["samples_equal"], notice["weights_equal"]) == (True, True, True)
