"""`pctool ckpt` as a process, on run directories. Slurm is not there, nor is S3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pctool.checkpoint import manifest as mf
from pctool.run.layout import RunDir, checkpoint_name
from pctool.run.ledger import Ledger
from pctool.run.records import Claim, claim_bytes

NEWEST = checkpoint_name(0, 40)

PROGRAM = """
import json, sys
from pctool.cli.main import main
code = main(sys.argv[1:])
heavy = [name for name in ("torch", "numpy", "boto3", "rich", "awscrt") if name in sys.modules]
print(json.dumps(heavy), file=sys.stderr)
sys.exit(code)
"""


def pctool(*words: str | Path, program: tuple[str, ...] = ("-m", "pctool")) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, *program, "ckpt", *map(str, words)]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PCTOOL_"))}
    env["PATH"] = str(Path(sys.executable).parent)
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Make a run with four checkpoints in one line, which job 7 claimed long ago."""
    made = RunDir(tmp_path / "my run")
    made.attempt(0).path.mkdir(parents=True)
    claim = Claim(job_id="7", restart=0, nonce="n", host="a", nodes=("a",), time=1.0, hub="a:1")
    made.attempt(0).claim.write_bytes(claim_bytes(claim))
    parent = None
    for step in (10, 20, 30, 40):
        name = checkpoint_name(0, step)
        folder = made.checkpoints / name
        folder.mkdir(parents=True)
        for file in ("a", "b"):
            (folder / file).write_bytes(f"{file} of {name}".encode() * 100)
        entries = {file: mf.describe_file(folder / file) for file in ("a", "b")}
        said = {"run": str(made.path), "attempt": 0, "step": step, "parent": parent, "world_size": 4, "time": 9.0}
        (folder / mf.NAME).write_bytes(mf.encode(mf.Manifest(**said, files=entries)))  # type: ignore[arg-type]
        Ledger(made.ledger).append("committed", attempt=0, name=name, step=step, parent=parent)
        parent = name
    return made


def test_ls_prints_columns_and_imports_nothing_heavy(run: RunDir) -> None:
    (run.checkpoints / checkpoint_name(0, 50)).mkdir()
    done = pctool("ls", run.path, program=("-c", PROGRAM))
    assert (done.returncode, json.loads(done.stderr)) == (0, [])
    header, torn, newest, *_ = done.stdout.splitlines()
    assert " ".join(header.split()) == "name attempt step state where bytes files world age parent note"
    assert "not complete" in torn
    assert "no MANIFEST: it was never finished" in torn
    assert newest.split()[:3] == [NEWEST, "0", "40"]
    assert newest.endswith("resumed next")


def test_verify_tells_the_file_and_exits_by_what_it_found(run: RunDir) -> None:
    done = pctool("verify", run.path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{NEWEST}  posix  good  (2 files, ")
    (run.checkpoints / NEWEST / "a").write_bytes(b"z" * len(f"a of {NEWEST}" * 100))
    done = pctool("verify", run.path, "--all", "--json", "--progress")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert [(one["name"], one["ok"]) for one in found["checkpoints"]][:2] == [
        (NEWEST, False),
        (checkpoint_name(0, 30), True),
    ]
    assert [finding["file"] for finding in found["checkpoints"][0]["findings"]] == ["a"]
    assert f"posix {NEWEST}: " in done.stderr
    assert "/s" in done.stderr
    assert pctool("verify", run.path, "--at", checkpoint_name(0, 30)).returncode == 0
    assert pctool("verify", run.checkpoints / NEWEST).returncode == 1


def test_prune_says_what_it_does_and_not_while_a_job_works(run: RunDir) -> None:
    planned = pctool("prune", run.path, "--keep", "3", "--dry-run")
    assert planned.stdout.splitlines()[0].startswith(f"would remove {checkpoint_name(0, 10)}  posix  step 10  ")
    beat = run.attempt(0).heartbeat
    beat.write_text(json.dumps({"time": time.time(), "step": 40}))
    refused = pctool("prune", run.path, "--keep", "3")
    assert (refused.returncode, refused.stdout) == (3, "")
    assert "this run is in use: attempt 0 may be at work" in refused.stderr
    assert "-> wait until it ends" in refused.stderr
    assert len(os.listdir(run.checkpoints)) == 4
    beat.write_text(json.dumps({"time": 1.0, "step": 40}))
    done = json.loads(pctool("prune", run.path, "--keep", "3", "--json").stdout)
    assert [one["name"] for one in done["removed"]] == [checkpoint_name(0, 10)]
    assert len(done["kept"]["posix"]) == 3
    left = sorted(name for name in os.listdir(run.checkpoints) if not name.startswith("."))
    assert left == [checkpoint_name(0, step) for step in (20, 30, 40)]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("ls", "NOWHERE"), 4, "no run directory here"),
        (("verify", "NOWHERE"), 4, "no run directory here"),
        (("verify", "RUN", "--at", "000000-00000099"), 4, "no checkpoint 000000-00000099 here"),
        (("verify", "RUN", "--at", "40"), 2, "is not a checkpoint's name"),
        (("ls", "s3://bucket"), 2, "names no run"),
        (("prune", "RUN", "--keep", "0"), 2, "'0' is not a number"),
        (("prune", "s3://bucket/gpt", "--keep", "2"), 2, "is no run directory"),
        (("mirror", "RUN"), 2, "no S3 to mirror this to"),
        (("restore", "RUN"), 2, "what is to be restored where?"),
        (("export", "RUN", "out.bin"), 2, "does not say which format"),
        (("export", "RUN", "/nowhere/out.pt"), 2, "there is no such folder"),
    ],
)
def test_bad_input_is_told_in_a_sentence(run: RunDir, words: tuple[str, ...], code: int, said: str) -> None:
    named = {"RUN": str(run.path), "NOWHERE": str(run.path / "nowhere")}
    done = pctool(*(named.get(word, word) for word in words))
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_tier_that_cannot_be_read_is_no_empty_one(run: RunDir) -> None:
    run.checkpoints.rename(run.path / "away")
    run.checkpoints.write_text("mounted wrong")
    done = pctool("ls", run.path)
    assert (done.returncode, done.stdout) == (3, "")
    assert "cannot be read" in done.stderr
