"""Doctor's checks on settings as Slurm prints them, on a probe's answers, and on a store that behaves badly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pctool.aws import s3 as s3_module
from pctool.aws.s3 import S3RefusedError, Stored
from pctool.errors import SlurmError
from pctool.job import doctor as module
from pctool.job.doctor import Check, Options, as_json, node_checks, settings_checks, verdict
from pctool.job.probe import HERE, THERE, canary, probe
from pctool.slurm import query
from pctool.slurm.command import Completed
from pctool.slurm.parse import parse_config, parse_partitions

GOOD = """Configuration data as of 2026-11-30T07:56:31
AuthInfo                = cred_expire=70
JobFileAppend           = 1
KillOnBadExit           = 0
RequeueExit             = 1,80-90
RequeueExitHold         = 86
SlurmdTimeout           = 180 sec
"""
SHIPPED = """AuthInfo                = cred_expire=5
JobFileAppend           = 0
KillOnBadExit           = 0
RequeueExit             = (null)
RequeueExitHold         = (null)
SlurmdTimeout           = 0 sec
"""


def by_name(checks: Sequence[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_good_settings() -> None:
    checks = settings_checks(parse_config(GOOD), wait=60)
    assert {check.status for check in checks} == {"ok"}
    assert "71 s" in by_name(checks)["requeue delay"].found


def test_settings_that_deserve_a_word() -> None:
    checks = by_name(settings_checks(parse_config(SHIPPED), wait=60))
    warned = {name for name, check in checks.items() if check.status == "warn"}
    assert warned == {"RequeueExit", "RequeueExitHold", "JobFileAppend", "SlurmdTimeout", "requeue delay"}
    assert all(checks[name].advice for name in warned)


def test_no_cred_expire_is_slurm_s_default() -> None:
    assert "121 s" in by_name(settings_checks({}, wait=60))["requeue delay"].found


@pytest.mark.parametrize(("wait", "status"), [(60, "ok"), (179, "ok"), (180, "warn"), (0, "warn")])
def test_wait_against_slurmd_timeout(wait: int, status: str) -> None:
    assert by_name(settings_checks(parse_config(GOOD), wait=wait))["SlurmdTimeout"].status == status


PARTITIONS = """PartitionName=spot
   Default=YES
   State=UP TotalCPUs=64 TotalNodes=4

PartitionName=old
   Default=NO
   State=DOWN TotalCPUs=64 TotalNodes=4
"""


@pytest.mark.parametrize(("wanted", "status"), [(None, "ok"), ("spot", "ok"), ("old", "fail"), ("p5", "fail")])
def test_partition(monkeypatch: pytest.MonkeyPatch, wanted: str | None, status: str) -> None:
    monkeypatch.setattr(query, "partitions", lambda: parse_partitions(PARTITIONS))
    check = module._partition(wanted)
    assert check.status == status
    assert status == "ok" or check.advice


def answer_on_the_node(argv: Sequence[str], **_: Any) -> Completed:
    """Stand for srun: run the probe here, as if this were the node."""
    question = json.loads(argv[-1])
    found = probe(**{**question, "python": "/bin/false"})
    return Completed(tuple(argv), 0, f"a line of a prolog\n{json.dumps({**found, 'node': 'n1'})}\n", "")


def test_a_shared_folder_is_seen_both_ways_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(query, "ask", answer_on_the_node)
    checks = by_name(node_checks(Options(run_dir=tmp_path / "a" / "b")))
    assert (checks["node"].status, checks["run directory"].status) == ("ok", "ok")
    assert checks["instance metadata"].status == "warn"
    assert checks["torch"].status == "fail"
    assert not (tmp_path / "a").exists()


def test_a_folder_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEEN_S", 0.0)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:1")

    def on_another_disk(argv: Sequence[str], **_: Any) -> Completed:
        question = json.loads(argv[-1])
        Path(question["folder"], HERE).unlink()
        return answer_on_the_node(argv)

    def written_elsewhere(argv: Sequence[str], **_: Any) -> Completed:
        done = answer_on_the_node(argv)
        Path(json.loads(argv[-1])["folder"], THERE).unlink()
        return done

    for stand_in, words in ((on_another_disk, "not seen on the node"), (written_elsewhere, "not seen here")):
        monkeypatch.setattr(query, "ask", stand_in)
        check = by_name(node_checks(Options(run_dir=tmp_path / "run")))["run directory"]
        assert (check.status, words in check.found) == ("fail", True)


def test_a_probe_that_does_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = Completed(("srun",), 1, "", "srun: error: execve(): /venv/bin/python: No such file or directory")
    asked: list[Sequence[str]] = []

    def ask(argv: Sequence[str], **_: Any) -> Completed:
        asked.append(argv)
        return said

    monkeypatch.setattr(query, "ask", ask)
    (check,) = node_checks(Options(run_dir=tmp_path / "run"))
    (name,) = [word.removeprefix("--job-name=") for word in asked[0] if word.startswith("--job-name=")]
    assert asked[1:] == [["scancel", "--quiet", "--me", f"--name={name}"]]
    assert (check.name, check.status) == ("node", "fail")
    assert "No such file or directory" in check.found
    (tmp_path / "file").write_text("")
    (check,) = node_checks(Options(run_dir=tmp_path / "file" / "run"))
    assert (check.name, check.status) == ("run directory", "fail")


def test_a_probe_that_cannot_be_cancelled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(argv: Sequence[str], **_: Any) -> None:
        raise KeyboardInterrupt if "srun" in argv else SlurmError("no answer in 30 s")

    monkeypatch.setattr(query, "ask", silent)
    (check,) = node_checks(Options())
    assert "may still start a node: no answer in 30 s" in check.found
    assert "`scancel --quiet --me --name=pctool-doctor-" in check.advice


def test_slurm_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: Any, **__: Any) -> None:
        raise SlurmError("no answer in 30 s", fix="start it")

    monkeypatch.setattr(query, "ask", silent)
    checks = module.examine(Options())
    assert [check.status for check in checks] == ["fail"] * 4
    assert verdict(checks) == 1
    assert as_json(checks)["checks"][-1] == {
        "name": "Slurm settings",
        "status": "fail",
        "found": "no answer in 30 s",
        "advice": "start it",
    }


def test_warnings_are_no_failure() -> None:
    assert verdict([Check(name="x", status="warn", found="")]) == 0


class FakeS3:
    """A bucket; the class attributes make it behave badly."""

    conditional, refuses, forgets, no_uploads = True, False, False, False

    def __init__(self, url: str) -> None:
        self.objects: dict[str, bytes] = {}

    def put_new(self, key: str, data: bytes) -> bool:
        if self.refuses:
            raise S3RefusedError("S3 refused: AccessDenied", where="s3://b", fix="give the role s3:PutObject")
        if key in self.objects and self.conditional:
            return False
        self.objects[key] = b"" if self.forgets else data
        return True

    def stored(self, key: str) -> Stored | None:
        return Stored(len(self.objects[key]), None)

    def read(self, key: str) -> bytes | None:
        return self.objects[key]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            del self.objects[key]

    def check_uploads(self, key: str) -> None:
        if self.no_uploads:
            raise S3RefusedError("S3 refused: AccessDenied", where="s3://b", fix="give s3:ListBucketMultipartUploads")


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("conditional", True, ""),
        ("conditional", False, "ignores If-None-Match"),
        ("refuses", True, "AccessDenied"),
        ("forgets", True, "gave back"),
        ("no_uploads", True, "ListBucketMultipartUploads"),
    ],
)
def test_the_canary(monkeypatch: pytest.MonkeyPatch, attribute: str, value: bool, words: str) -> None:
    monkeypatch.setattr(s3_module, "S3", type("S3", (FakeS3,), {attribute: value}))
    found = canary("s3://bucket/prefix")
    assert words in found
    assert bool(found) == bool(words)
    check = module._store("S3 from here", found)
    assert check.status == ("fail" if words else "ok")
