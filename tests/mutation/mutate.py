"""Take one safeguard out of a copy of the package at a time, and see that a test fails for it.

Run by hand: `python tests/mutation/mutate.py [NAME ...]`. Each mutation names the lines it replaces (they must be there
exactly once) and the tests that must fail. Exit code 1 if any mutation survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """`old` in `file` becomes `new`; one of `tests` must then fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="gang-agreement",
        file="pctool/train/stop.py",
        old="        if self.store is None:\n            return self._alone(step, costs)\n",
        new="        return Decision(step=step)  # every rank stops where it happens to be\n",
        tests=("tests/unit/train/test_stop_agreement.py",),
    ),
    Mutation(
        name="manifest-sizes",
        file="pctool/checkpoint/manifest.py",
        old="    return _verdict(found, size_faults(found, sizes))",
        new="    return _verdict(found, {})",
        tests=("tests/unit/checkpoint",),
    ),
    Mutation(
        name="manifest-bytes",
        file="pctool/checkpoint/manifest.py",
        old="    return {name: fault for name, fault in faults.items() if fault}",
        new="    return {}",
        tests=("tests/unit/checkpoint", "tests/contract/test_store_restore.py"),
    ),
    Mutation(
        name="sampler-position",
        file="pctool/train/run.py",
        old='            self.sampler.load_state_dict(dict(position["sampler"]))',
        new="            pass",
        tests=("tests/train/test_train_resume.py",),
    ),
    Mutation(
        name="workers-end-with-their-rank",
        file="pctool/train/loading.py",
        old="            child.kill()",
        new="            pass",
        tests=("tests/train/test_train_resume.py::test_an_exception_ends_a_rank_that_has_workers",),
    ),
    Mutation(
        name="fence-of-checkpoints",
        file="pctool/checkpoint/fence.py",
        old="    if newest > attempt:",
        new="    if newest > attempt + 10**6:",
        tests=("tests/unit/checkpoint", "tests/contract/test_store_contract.py"),
    ),
    Mutation(
        name="fence-of-decide",
        file="pctool/job/decide.py",
        old="    if newest_attempt > attempt:\n        return _fenced(newest_attempt)\n",
        new="",
        tests=("tests/unit/job/test_decide.py",),
    ),
    Mutation(
        name="wait-for-the-commit",
        file="pctool/node/member.py",
        old="        alone = self._hub_gone or self._released or self._signalled is not None",
        new="        alone = True",
        tests=("tests/unit/node/test_member_decisions.py", "tests/node/test_gang_stop.py"),
    ),
    Mutation(
        name="wait-for-the-writers",
        file="pctool/node/gang.py",
        old="        if not self._page.writing:\n            return False\n",
        new="        return False\n",
        tests=("tests/unit/node/test_gang_decisions.py",),
    ),
    Mutation(
        name="all-ranks-had-copied",
        file="pctool/checkpoint/coordinator.py",
        old="        missing = sorted(self._gone - pending.written - pending.failed.keys())\n",
        new="        missing: list[int] = []\n",
        tests=("tests/unit/checkpoint/test_coordinator.py",),
    ),
    Mutation(
        name="proof-while-reading",
        file="pctool/checkpoint/reader.py",
        old="        if (size, crc) != (entry.size, entry.crc64nvme):\n",
        new="        if size != entry.size:\n",
        tests=("tests/unit/checkpoint/test_reader.py",),
    ),
    Mutation(
        name="decide-trusts-srun",
        file="pctool/job/decide.py",
        old='    if decision.cause == "fenced":\n',
        new="    if ending.srun_code is not None:\n"
        "        decision = replace(decision, code=ending.srun_code, requeue=False)\n"
        '    if decision.cause == "fenced":\n',
        tests=("tests/unit/job/test_decide.py",),
    ),
)


def apply(mutation: Mutation, copy: Path) -> None:
    """Write the mutation into the copy; raise ValueError if the lines are not there exactly once."""
    path = copy / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.name}: {text.count(mutation.old)} places in {mutation.file}, expected 1")
    path.write_text(text.replace(mutation.old, mutation.new))


def run(mutation: Mutation | None, tests: tuple[str, ...]) -> tuple[bool, float, str]:
    """Run tests on a (mutated) copy; return whether they passed, the seconds, and the last lines."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pctool-mutant-") as folder:
        copy = Path(folder)
        for name in ("pctool", "tests", "docs", "cluster-configs", "sbatch-templates", "bootstrap"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if mutation:
            apply(mutation, copy)
        argv = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
        env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(argv, cwd=copy, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode not in {0, 1}:
        raise RuntimeError(f"pytest did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0, time.monotonic() - began, done.stdout.strip()[-600:]


def main(names: list[str]) -> int:
    """Run the named mutations, or all."""
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    survived = 0
    for mutation in chosen:
        healthy, _, said = run(None, mutation.tests)
        if not healthy:
            print(f"{mutation.name}: its tests fail without the mutation\n{said}")
            survived += 1
            continue
        passed, seconds, said = run(mutation, mutation.tests)
        survived += passed
        last = said.splitlines()[-1] if said else ""
        print(f"{mutation.name}: {'SURVIVED' if passed else 'caught'} in {seconds:.0f} s: {last}", flush=True)
    return 1 if survived or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
