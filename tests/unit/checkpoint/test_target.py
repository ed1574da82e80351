"""From what a user types to tiers and names."""

from __future__ import annotations

from pathlib import Path

import pytest

from pctool.checkpoint.target import pick, resolve, split_address
from pctool.errors import NotFoundError, UsageError

NAME = "000003-00001200"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://b/gpt", ("s3://b", "gpt", None)),
        ("s3://b/p/q/gpt/", ("s3://b/p/q", "gpt", None)),
        ("s3://b/p/gpt/checkpoints", ("s3://b/p", "gpt", None)),
        (f"s3://b/p/gpt/checkpoints/{NAME}", ("s3://b/p", "gpt", NAME)),
        ("s3://b/p/sweep/task-3", ("s3://b/p", "sweep/task-3", None)),
        (f"s3://b/sweep/task-3/checkpoints/{NAME}/", ("s3://b", "sweep/task-3", NAME)),
    ],
)
def test_an_address_is_split_as_the_store_s_keys_are_made(text: str, expected: tuple[str, str, str | None]) -> None:
    assert split_address(text) == expected


@pytest.mark.parametrize("text", ["s3://", "s3://b", "s3://b/", "s3://b/checkpoints"])
def test_an_address_without_a_run_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="names no run"):
        split_address(text)


def test_a_run_a_checkpoint_in_it_and_one_that_lies_alone(tmp_path: Path) -> None:
    folder = tmp_path / "gpt" / "checkpoints" / NAME
    folder.mkdir(parents=True)
    whole = resolve(str(tmp_path / "gpt"), store=None)
    assert (whole.name, whole.run and whole.run.path) == (None, tmp_path / "gpt")
    one = resolve(str(folder), store=None)
    assert (one.name, one.run and one.run.path) == (NAME, tmp_path / "gpt")
    assert resolve(str(tmp_path / "gpt"), store=None, at=NAME).name == NAME
    alone = resolve(str(tmp_path / "copies" / NAME), store=None)
    assert (alone.name, alone.run, alone.where) == (NAME, None, str(tmp_path / "copies"))
    with pytest.raises(NotFoundError, match=f"no checkpoint {NAME}"):
        pick(alone, alone.names())
    assert pick(one, one.names()) == [NAME]


def test_what_is_no_run_or_no_name_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no run directory here"):
        resolve(str(tmp_path / "nowhere"), store=None)
    with pytest.raises(NotFoundError, match="no run directory here"):
        resolve(str(tmp_path), store=None)
    (tmp_path / "checkpoints" / NAME).mkdir(parents=True)
    with pytest.raises(UsageError, match="is not a checkpoint's name"):
        resolve(str(tmp_path), store=None, at="newest")
    with pytest.raises(UsageError, match="is one checkpoint"):
        resolve(str(tmp_path / "checkpoints" / NAME), store=None, at="000003-00001300")
    missing = resolve(str(tmp_path), store=None, at="000003-00001300")
    with pytest.raises(NotFoundError, match="no checkpoint 000003-00001300") as caught:
        pick(missing, missing.names())
    assert caught.value.fix == f"there are {NAME}"
