"""What a verb's help may import: start-up is paid at every call, on a shared file system with interest."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pctool.cli.main import VERBS

HEAVY = ("torch", "numpy", "boto3", "botocore", "awscrt", "submitit", "jinja2", "rich", "yaml", "moto")

# What a verb's help may not import besides HEAVY: a verb's module pulls in no neighbour's.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "render": ("pctool.rehearsal", "pctool.node", "pctool.train", "pctool.slurm.private"),
    "submit": ("pctool.rehearsal", "pctool.node", "pctool.train", "pctool.slurm.private"),
    "status": ("pctool.rehearsal", "pctool.node", "pctool.train", "pctool.slurm.private", "pctool.cluster"),
    "logs": ("pctool.rehearsal", "pctool.node", "pctool.train", "pctool.slurm.private", "pctool.cluster"),
    "attempts": ("pctool.rehearsal", "pctool.node", "pctool.train", "pctool.slurm.private", "pctool.cluster"),
    "stop": ("pctool.rehearsal", "pctool.node", "pctool.train", "pctool.slurm.private", "pctool.cluster"),
    "resume": ("pctool.rehearsal", "pctool.node", "pctool.train", "pctool.slurm.private", "pctool.cluster"),
    "nudge": ("pctool.rehearsal", "pctool.node", "pctool.train", "pctool.slurm.private", "pctool.cluster"),
    "ckpt": ("pctool.rehearsal", "pctool.node", "pctool.train", "pctool.job", "pctool.checkpoint", "pctool.cluster"),
    "doctor": ("pctool.rehearsal", "pctool.train", "pctool.slurm.private"),
    "rehearse": ("pctool.train",),
    "local": ("pctool.rehearsal", "pctool.job", "pctool.train"),
    "claim": ("pctool.rehearsal", "pctool.node", "pctool.train", "pctool.slurm.private", "pctool.cluster"),
    "launch": ("pctool.rehearsal", "pctool.job", "pctool.train", "pctool.slurm.private", "pctool.cluster", "asyncio"),
    "decide": ("pctool.rehearsal", "pctool.node", "pctool.train", "pctool.slurm.private", "pctool.cluster"),
    "watch": ("pctool.rehearsal", "pctool.job", "pctool.train", "pctool.slurm.private", "pctool.cluster", "asyncio"),
}

PROGRAM = """
import json, sys
from pctool.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as exit:
    code = exit.code
print(json.dumps({"code": code, "modules": sorted(sys.modules)}), file=sys.stderr)
"""


def modules_after(*argv: str) -> set[str]:
    argv = (sys.executable, "-c", PROGRAM, *argv)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stderr.splitlines()[-1])
    assert seen["code"] == 0
    return set(seen["modules"])


def test_the_top_level_help_imports_no_verb_and_nothing_heavy() -> None:
    modules = modules_after("--help")
    assert modules.isdisjoint(HEAVY)
    ours = {name for name in modules if name.split(".")[0] == "pctool"}
    assert ours == {"pctool", "pctool.cli", "pctool.cli.main", "pctool.errors"}
    assert "argparse" not in modules  # ours is printed from the table of verbs


@pytest.mark.parametrize("name", VERBS)
def test_a_verbs_help_imports_nothing_heavy_and_no_other_verb(name: str) -> None:
    modules = modules_after(name, "--help")
    assert modules.isdisjoint(HEAVY)
    assert modules.isdisjoint(FORBIDDEN[name])
    others = {verb.module for other, verb in VERBS.items() if other != name}
    assert modules.isdisjoint(others)


def test_importing_the_package_is_cheap() -> None:
    program = "import sys, pctool; print(*sorted(n for n in sys.modules if n.startswith('pctool.')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []
