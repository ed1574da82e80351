"""Checkpoints that only S3 has: listed, brought back, exported; and those of a run, mirrored and pruned on request."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made import FIRST, NEWEST, SHARDS, add_checkpoint, flip, make_run
from s3_standin import Fault, StandIn

from pctool.aws.s3 import S3DownError
from pctool.checkpoint import fetch, tidy
from pctool.checkpoint import manifest as mf
from pctool.checkpoint.export import Options, export_target
from pctool.checkpoint.foreign import ForeignCheckpointError
from pctool.checkpoint.listing import list_checkpoints
from pctool.checkpoint.mirror import Mirror
from pctool.checkpoint.mirrornow import mirror_now
from pctool.checkpoint.retention import Retention
from pctool.checkpoint.s3store import S3Store
from pctool.checkpoint.target import resolve
from pctool.errors import IncompleteError, NotFoundError
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger

ONE = SHARDS[0]


@pytest.fixture
def run(tmp_path: Path, url: str) -> RunDir:
    """Make a run whose two checkpoints are on S3 too."""
    made = make_run(tmp_path / "gpt")
    assert Mirror(made, S3Store(url, "gpt"), 0).poke()
    return made


def pctool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "pctool", "ckpt", *map(str, words)]
    env = {**os.environ, "PATH": str(Path(sys.executable).parent)}  # no Slurm here
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)


def fetch_newest(url: str, into: Path) -> fetch.Fetched:
    source = resolve(f"{url}/gpt", store=None)
    return fetch.fetch(source.stores[-1], fetch.choose(source), into)


def test_what_is_there_is_told_tier_by_tier(run: RunDir, url: str) -> None:
    third = add_checkpoint(run, 30, parent=NEWEST)
    (run.checkpoints / FIRST / ONE).unlink()
    listing = list_checkpoints(resolve(str(run.path), store=url))
    assert [(row.name, row.tiers) for row in listing.rows] == [
        (third, ("posix",)),
        (NEWEST, ("posix", "s3")),
        (FIRST, ("s3",)),
    ]
    assert listing.resume == third
    assert listing.rows[2].notes == (f"posix: {ONE}: missing",)
    alone = list_checkpoints(resolve(f"{url}/gpt", store=None))
    assert [(row.name, row.tiers, row.resume) for row in alone.rows] == [
        (NEWEST, ("s3",), True),
        (FIRST, ("s3",), False),
    ]


def test_an_address_with_nothing_is_not_found_and_a_tier_that_is_down_is_neither(url: str, s3: StandIn) -> None:
    with pytest.raises(NotFoundError, match="no checkpoints here"):
        list_checkpoints(resolve(f"{url}/other", store=None))
    s3.faults.append(Fault("broken", "GET"))
    with pytest.raises(S3DownError):
        list_checkpoints(resolve(f"{url}/other", store=None))


def test_what_another_run_saved_is_shown_as_that(run: RunDir, url: str, tmp_path: Path) -> None:
    other = RunDir(tmp_path / "elsewhere" / "gpt")
    other.attempt(0).path.mkdir(parents=True)
    listing = list_checkpoints(resolve(str(other.path), store=url))
    assert [row.foreign for row in listing.rows] == [str(run.path)] * 2
    assert (listing.resume, "another run" in (listing.held or "")) == (None, True)
    with pytest.raises(ForeignCheckpointError):
        fetch.choose(resolve(str(other.path), store=url), other)


def test_a_restore_makes_it_whole_and_fetches_only_what_is_not_good(run: RunDir, url: str, s3: StandIn) -> None:
    shutil.rmtree(run.checkpoints)
    done = fetch_newest(url, run.checkpoints)
    assert (done.name, len(done.fetched)) == (NEWEST, 3)
    assert mf.verify(run.checkpoints / NEWEST).ok
    s3.seen.clear()
    assert fetch_newest(url, run.checkpoints).fetched == ()
    assert not [path for _, path in s3.seen if ONE in path and "prefix=" not in path]
    path = run.checkpoints / NEWEST / ONE
    path.write_bytes(flip(path.read_bytes()))
    assert fetch_newest(url, run.checkpoints).fetched == (ONE,)
    assert mf.verify(run.checkpoints / NEWEST).ok


@pytest.mark.parametrize("fault", ["broken", "flip"])
def test_a_restore_that_fails_leaves_nothing_that_passes_for_complete(
    run: RunDir, url: str, s3: StandIn, fault: str
) -> None:
    path = run.checkpoints / NEWEST / ONE
    path.write_bytes(flip(path.read_bytes()))
    assert mf.is_complete(run.checkpoints / NEWEST).ok  # by its sizes alone
    s3.faults.append(Fault(fault, "GET", ONE))
    with pytest.raises((S3DownError, IncompleteError)):
        fetch_newest(url, run.checkpoints)
    assert not mf.is_complete(run.checkpoints / NEWEST).ok
    s3.faults.clear()
    fetch_newest(url, run.checkpoints)
    assert mf.verify(run.checkpoints / NEWEST).ok


def test_a_restore_takes_the_newest_that_is_complete_and_keeps_what_is_another(run: RunDir, url: str) -> None:
    store = S3Store(url, "gpt")
    store.s3.delete([f"{store.root}/{NEWEST}/{ONE}"])
    source = resolve(f"{url}/gpt", store=None)
    assert fetch.choose(source) == FIRST
    with pytest.raises(IncompleteError, match=f"{ONE}: missing"):
        fetch.fetch(store, NEWEST, run.checkpoints)
    with pytest.raises(NotFoundError, match="000009-00000001"):
        fetch.choose(resolve(f"{url}/gpt", store=None, at="000009-00000001"))
    manifest = mf.read_manifest(run.checkpoints / FIRST)
    assert manifest is not None
    ours = mf.encode(replace(manifest, time=1.0))
    (run.checkpoints / FIRST / mf.NAME).write_bytes(ours)
    with pytest.raises(ForeignCheckpointError, match="with other contents"):
        fetch.fetch(store, FIRST, run.checkpoints)
    assert (run.checkpoints / FIRST / mf.NAME).read_bytes() == ours


def test_what_only_s3_has_is_exported(run: RunDir, url: str, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    name, done = export_target(resolve(f"{url}/gpt", store=None), out, Options(), lambda *_: lambda _: None)
    assert (name, done.tensors) == (NEWEST, 2)
    assert torch.equal(torch.load(out)["model"]["a"], torch.full((8, 4), 20.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt", "out.pt"]


def test_mirroring_now_copies_what_is_missing_and_names_what_is_left(run: RunDir, url: str, s3: StandIn) -> None:
    target = resolve(str(run.path), store=url)
    assert mirror_now(target, 0).copied == {}
    third = add_checkpoint(run, 30, parent=NEWEST)
    done = mirror_now(target, 0)
    assert (done.complete, list(done.copied), done.left) == (True, [third], ())
    fourth = add_checkpoint(run, 40, parent=third)
    (run.checkpoints / fourth / ONE).write_bytes(flip((run.checkpoints / fourth / ONE).read_bytes()))
    done = mirror_now(target, 0)  # damaged: named, and no reason to wait
    assert done.copied == {}
    assert "rejected" in [event.event for event in Ledger(run.ledger).read()]


def test_pruning_works_on_each_tier_and_leaves_other_runs_alone(run: RunDir, url: str, tmp_path: Path) -> None:
    for step, parent in ((30, NEWEST), (40, "000000-00000030")):
        add_checkpoint(run, step, parent=parent)
    shutil.rmtree(run.checkpoints / FIRST)
    target = resolve(str(run.path), store=url)
    plan = tidy.plan(target, Retention(keep=2))
    assert [(one.name, one.store.tier) for one in plan.removals] == [(NEWEST, "posix")]  # S3 has but two
    assert mirror_now(target, 0).complete
    stranger = make_run(tmp_path / "elsewhere" / "gpt", 5)
    store, name = S3Store(url, "gpt"), "000000-00000005"
    manifest = mf.read_manifest(stranger.checkpoints / name)
    assert manifest is not None
    for file, entry in manifest.files.items():
        store.put(name, file, stranger.checkpoints / name / file, entry)
    store.publish(name, mf.encode(manifest))
    plan = tidy.plan(target, Retention(keep=3))
    assert [(one.name, one.store.tier) for one in plan.removals] == [(FIRST, "s3")]
    assert [one.name for one in tidy.remove(target, plan, 0)] == [FIRST]
    assert FIRST not in S3Store(url, "gpt").names()
    assert plan.kept["s3"] == ("000000-00000040", "000000-00000030", NEWEST)


def test_the_program_on_s3(run: RunDir, url: str, tmp_path: Path) -> None:
    (run.path / "job.toml").write_text(f'[checkpoint]\nstore = "{url}"\n')
    listed = json.loads(pctool("ls", run.path, "--json").stdout)
    assert [row["where"] for row in listed["checkpoints"]] == [["posix", "s3"]] * 2
    assert (listed["store"], listed["resume"]) == (url, NEWEST)
    anew = tmp_path / "anew"
    done = pctool("restore", f"{url}/gpt", anew, "--json")
    assert done.returncode == 0, done.stderr
    assert (json.loads(done.stdout)["name"], mf.verify(anew / "checkpoints" / NEWEST).ok) == (NEWEST, True)
    assert pctool("restore", f"{url}/gpt").returncode == 2
    damaged = run.checkpoints / NEWEST / ONE
    damaged.write_bytes(flip(damaged.read_bytes()))
    done = pctool("verify", run.path, "--read")
    assert done.returncode == 1
    assert f"{ONE}: CRC64-NVME" in done.stdout
    assert done.stdout.count("good") == 1
    assert pctool("restore", run.path).returncode == 0
    assert pctool("verify", run.path).returncode == 0
    assert "all that is complete is on S3" in pctool("mirror", run.path).stdout
