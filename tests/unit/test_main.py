"""The one place where errors become messages and exit codes."""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from pctool.cli import main as module
from pctool.cli.main import main

Fail = Callable[[OSError], None]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Return a way to make the next verb raise."""

    def make(error: OSError) -> None:
        def run(_: object) -> int:
            raise error

        verb = SimpleNamespace(run=run, configure=lambda parser: parser.add_argument("job"))
        monkeypatch.setattr(importlib, "import_module", lambda _: verb)

    return make


def test_a_reader_that_has_gone_is_no_error(fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    discarded: list[None] = []
    monkeypatch.setattr(module, "_discard", discarded.append)
    fail(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    assert main(["stop", "7"]) == 0
    assert len(discarded) == 1


@pytest.mark.parametrize("code", [errno.ESHUTDOWN, errno.EPIPE])
def test_a_file_system_that_went_away_is_one(fail: Fail, capsys: pytest.CaptureFixture[str], code: int) -> None:
    # a client that Lustre has evicted gets ESHUTDOWN, which is a BrokenPipeError to Python
    error = OSError(code, os.strerror(code), "/fsx/run/attempts/000000/stop")
    assert isinstance(error, BrokenPipeError)
    fail(error)
    assert main(["stop", "7"]) == 2
    assert f"/fsx/run/attempts/000000/stop: cannot be read or written: {os.strerror(code)}" in capsys.readouterr().err


@pytest.mark.parametrize("code", [errno.ESHUTDOWN, errno.ENOSPC, errno.EIO])
def test_a_file_system_s_error_may_name_no_file(fail: Fail, capsys: pytest.CaptureFixture[str], code: int) -> None:
    fail(OSError(code, os.strerror(code)))  # as of a read or a write, where only the opening knew the name
    assert main(["claim", "/fsx/run"]) == 2
    assert f"a file: cannot be read or written: {os.strerror(code)}" in capsys.readouterr().err


def test_any_other_error_without_a_file_is_a_fault_of_ours(fail: Fail) -> None:
    fail(OSError(errno.ECHILD, "No child processes"))
    with pytest.raises(ChildProcessError):
        main(["stop", "7"])
