"""What the script says and what the job says; and the metrics file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pctool.checkpoint.interval import Every
from pctool.checkpoint.retention import Retention
from pctool.checkpoint.settings import Wishes, resolve
from pctool.errors import UsageError
from pctool.run import env
from pctool.train.metrics import Metrics


def test_the_job_wins_over_the_script(tmp_path: Path) -> None:
    environ = {
        env.RUN_DIR: str(tmp_path),
        env.ATTEMPT: "3",
        env.EVERY: "7",
        env.KEEP: "2",
        env.STORE: "s3://b/p",
        env.PAGE: "/proc/1/fd/5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "node",
        "MASTER_PORT": "29500",
    }
    settings = resolve(environ, Wishes(run_dir="elsewhere", every=50))
    assert (settings.run.path, settings.attempt) == (tmp_path, 3)
    assert (settings.every, settings.retention) == (Every(steps=7), Retention(keep=2))
    assert (settings.store, settings.page, settings.local_rank) == ("s3://b/p", "/proc/1/fd/5", 1)
    assert settings.master == ("node", 29500)


def test_without_the_job_the_script_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = resolve({}, Wishes(every=50, keep_for="7d"))
    assert settings.run.path == tmp_path / "run"
    assert (settings.every, settings.world_size, settings.local_rank) == (Every(steps=50), 1, 0)
    assert {settings.attempt, settings.page, settings.master, settings.retention.keep} == {None}
    assert settings.retention.keep_for_s == 7 * 86400


@pytest.mark.parametrize(
    ("name", "value"),
    [(env.EVERY, "0"), (env.EVERY, "x"), (env.KEEP, "-1"), (env.ATTEMPT, "a"), ("MASTER_PORT", "ephemeral")],
)
def test_a_bad_number_is_named(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        resolve({name: value}, Wishes())


def test_a_bad_argument_is_named() -> None:
    with pytest.raises(UsageError, match=r"every of Run\(\.\.\.\) is 0"):
        resolve({}, Wishes(every=0))
    with pytest.raises(UsageError, match="keep_every=0"):
        resolve({}, Wishes(keep_every=0))


def test_metrics_wait_in_memory_until_they_are_flushed(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "metrics-rank0.jsonl"
    metrics = Metrics(path)
    metrics.log(1, {"loss": 0.5, "samples": [3, 1]})
    metrics.log(2, {"loss": torch.tensor(0.25)})
    assert not path.exists()
    metrics.flush()
    metrics.flush()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 0.5, "samples": [3, 1]}, {"step": 2, "loss": 0.25}]
    with pytest.raises(TypeError, match="object cannot be logged"):
        metrics.log(3, {"what": object()})
