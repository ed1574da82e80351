"""What becomes of a batch script that is to be submitted as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from pctool.cli.submit_script import has_batch_script
from pctool.errors import NotFoundError, UsageError
from pctool.job.batch import plan_batch
from pctool.job.find import Found
from pctool.job.output import follow_output, output_of, read_output
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.slurm.comment import format_comment

TEXT = b"#!/bin/bash\n"


@pytest.mark.parametrize(
    ("name", "text", "argv", "expected"),
    [
        ("job.sh", "#!/bin/bash\n", ["-N", "2", "FILE", "--lr", "3"], True),
        ("job.sh", "#!/usr/bin/env bash\n", ["FILE"], True),
        ("job.sh", "#!/usr/bin/bash -l\n", ["FILE"], True),
        ("job", "#SBATCH -N2\n", ["FILE"], True),
        ("train.py", "#!/usr/bin/env python3\n#SBATCH -N2\n", ["FILE"], True),
        ("train.py", "#!/usr/bin/env python3\n", ["FILE"], False),
        ("train.py", "import torch\n", ["FILE"], False),
        ("job.sh", "#!/bin/bash\n", ["-N", "2", "--", "FILE"], False),
        ("own.j2", "#!/bin/bash\n", ["--template", "FILE", "--", "train.py"], False),
        ("job.sh", "#!/bin/bash\n", ["job.toml", "--output", "FILE"], False),
        ("empty", "", ["FILE"], False),
        ("odd", "#!\n", ["FILE"], False),
        ("odd", "#!/usr/bin/env\n", ["FILE"], False),
        ("odd", "#!/usr/bin/env -S bash -e\n#SBATCH -N1\n", ["FILE"], True),
    ],
)
def test_what_is_a_batch_script(tmp_path: Path, name: str, text: str, argv: list[str], expected: bool) -> None:
    (tmp_path / name).write_text(text)
    assert has_batch_script([word.replace("FILE", str(tmp_path / name)) for word in argv]) is expected


def test_what_is_no_file_is_no_batch_script(tmp_path: Path) -> None:
    assert not has_batch_script([str(tmp_path), str(tmp_path / "missing.sh")])


@pytest.mark.parametrize("name", ["test-only", "wait", "help"])
def test_what_submits_no_job_or_waits_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"--{name}"):
        plan_batch("job.sh", TEXT, effective={name: ""})


def test_the_plan_names_folder_and_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_batch("a/job.sh", TEXT, options=["-N2"], arguments=["x"], effective={"job-name": "ä b/../c"})
    assert plan.argv == ("sbatch", "--parsable", "-N2", "a/job.sh", "x")
    assert (plan.folder, plan.name, plan.run_dirs) == (str(tmp_path / "runs"), "ä-b-..-c", ())
    assert plan_batch("a/job.sh", TEXT, effective={}).name == "job.sh"
    assert plan_batch("a/job.sh", TEXT, effective={"job-name": "//"}).name == "job"


def test_a_rendered_script_keeps_its_run_directory(tmp_path: Path) -> None:
    comment = {"comment": format_comment("/fsx/run/%a"), "array": "0-2"}
    plan = plan_batch("job.sh", TEXT, effective=comment)
    assert plan.run_dirs == ("/fsx/run/0", "/fsx/run/1", "/fsx/run/2")
    assert plan.remember == "/fsx/run/%a"
    with pytest.raises(UsageError, match="works in the run directory /fsx/run, not in"):
        plan_batch("job.sh", TEXT, effective={"comment": format_comment("/fsx/run")}, run_dir=str(tmp_path))


def test_output_that_was_truncated_by_a_requeue_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_bytes(b"one\ntwo\nthree\n")
    assert list(read_output(path, last=2)) == [b"two\n", b"three\n"]
    pieces = follow_output(path, alive=iter([True, False]).__next__)
    assert next(pieces) == b"one\ntwo\nthree\n"
    path.write_bytes(b"again\n")
    assert next(pieces) == b"again\n"
    assert list(follow_output(path, alive=lambda: False, last=0)) == []


def test_where_the_output_is_comes_from_the_ledger_once_slurm_has_forgotten(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert output_of(Found(run=run)) is None
    ledger = Ledger(run.ledger)
    ledger.append("submitted", job_id="7", script="/job.sh", output="/x/out-7.txt")
    assert output_of(Found(run=run)) == Path("/x/out-7.txt")
    ledger.append("submitted", job_id="8", script="/job.sh", output=None)
    with pytest.raises(NotFoundError, match="did not say where"):
        output_of(Found(run=run))
    ledger.append("submitted", job_id="9", script="/job.sh", output="/x/out-4294967294.txt")
    with pytest.raises(NotFoundError, match="a file for each task"):
        output_of(Found(run=run))
    run.attempt(0).path.mkdir(parents=True)
    assert output_of(Found(run=run)) is None
