"""`pctool watch` as a process: news on stdout, drain by Slurm's command, and its memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from pctool.aws.fake_imds import FakeImds
from pctool.aws.imds import Notice
from pctool.node.notice_file import read_sighting

WHEN = datetime(2030, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
WATCH = [sys.executable, "-m", "pctool", "watch"]
LIMIT_S = 60.0


@pytest.fixture
def fake() -> Iterator[FakeImds]:
    service = FakeImds()
    service.add("n1", instance_id="i-1", instance_type="p5.48xlarge", availability_zone="us-east-1a")
    yield service
    service.close()


@pytest.fixture
def environ(fake: FakeImds, tmp_path: Path) -> dict[str, str]:
    """Return an environment with the fake service, and a scontrol that writes down what it is asked."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{scontrol.parent}:{os.environ['PATH']}",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": fake.endpoint("n1"),
    }


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("poll", ["-1", "nan"])
@pytest.mark.parametrize("verb", [["watch", "--node", "n1"], ["launch"]])
def test_a_poll_time_that_is_none_is_refused(environ: dict[str, str], verb: list[str], poll: str) -> None:
    command = [*WATCH[:-1], *verb, "--poll-s", poll, *([] if verb[0] == "watch" else ["--", "x.py"])]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert "--poll-s" in done.stderr
    assert "Traceback" not in done.stderr


def test_roots_watcher_drains_and_leaves_word(fake: FakeImds, environ: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "run" / "notice.json"
    command = [*WATCH, "--node", "n1", "--drain", "--notice-file", str(file), "--poll-s", "0.05"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as watch:
        until(file.exists)
        assert not (tmp_path / "asked").exists()
        fake.notice("n1", when=WHEN)
        assert watch.stdout is not None
        news = json.loads(watch.stdout.readline())
        assert news["notice"] == {"action": "terminate", "time": WHEN.timestamp()}
        until((tmp_path / "asked").exists)
        watch.send_signal(signal.SIGTERM)
        assert watch.wait(LIMIT_S) == 0
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["update NodeName=n1 State=DRAIN Reason=pctool: spot notice, terminate at 2030-01-02T03:04:05Z"]
    sighting = read_sighting(file, node="n1", now=time.time())
    assert sighting is not None
    assert sighting.notice == Notice(action="terminate", time=WHEN.timestamp())
    assert file.stat().st_mode & 0o777 == 0o644


def test_once_prints_what_is_there(fake: FakeImds, environ: dict[str, str]) -> None:
    fake.rebalance("n1")
    done = subprocess.run([*WATCH, "--once", "--node", "n1"], env=environ, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["node"] == "n1"
    assert answer["notice"] is None
    assert abs(answer["rebalance"] - time.time()) < 60


def test_once_says_how_instance_metadata_fails(fake: FakeImds, environ: dict[str, str]) -> None:
    fake.fault("n1", "refuse-token")
    done = subprocess.run([*WATCH, "--once", "--node", "n1"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "gives no token (403)" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_watcher_fits_into_24_mb(environ: dict[str, str]) -> None:
    with subprocess.Popen([*WATCH, "--node", "n1", "--poll-s", "0.02"], env=environ) as watch:
        time.sleep(2)
        status = Path(f"/proc/{watch.pid}/status").read_text()
        watch.terminate()
    resident_kb = int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1])
    assert 5_000 < resident_kb < 24_000


def test_neither_watcher_nor_launch_import_what_is_heavy() -> None:
    code = "import sys, pctool.cli.watch, pctool.cli.launch; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "boto3", "submitit", "jinja2", "yaml", "rich", "http.client", "email", "asyncio", "ssl"}
    assert not heavy & set(done.stdout.split())
