"""Job specs from TOML, flags and Python: what they become, and what is refused, with file and line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pctool.errors import UsageError
from pctool.job.dump import dump_job
from pctool.job.keys import CHECKPOINT_KEYS, JOB_KEYS
from pctool.job.load import job_from_flags, load_job, parse_job, resolve_job
from pctool.spec.job import JobSpec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('hello')\n")
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def refused(folder: Path, text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load_job(write(folder, text))
    assert caught.value.exit_code == 2
    return caught.value


def test_every_field_has_exactly_one_key() -> None:
    named = [key.field for key in (*JOB_KEYS.values(), *CHECKPOINT_KEYS.values())]
    assert sorted([*named, "environment"]) == sorted(field.name for field in fields(JobSpec))


def test_paths_are_relative_to_the_job_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    spec = load_job(
        write(
            folder, 'command = ["train.py", "--data", "x"]\noutput = "o/%j.out"\nchdir = "."\npython = "env/bin/python"'
        )
    )
    assert spec.command == (str(folder / "train.py"), "--data", "x")
    assert spec.run_dir == str(folder / "runs" / "train")
    assert (spec.output, spec.chdir) == (str(folder / "o/%j.out"), str(folder))
    assert spec.python == str(folder / "env/bin/python")


def test_an_interpreters_name_stays_a_name(folder: Path) -> None:
    assert load_job(write(folder, 'command = ["train.py"]\npython = "python3.11"')).python == "python3.11"


def test_flags_win_over_the_file_and_are_relative_to_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(folder, 'command = ["train.py"]\nnodes = 2\nrun-dir = "here"\n[environment]\nA = "1"\nB = "1"')
    (folder / "cwd").mkdir()
    monkeypatch.chdir(folder / "cwd")
    spec = load_job(path, {"nodes": 4, "run_dir": "there", "environment": {"B": "2"}})
    assert (spec.nodes, spec.run_dir) == (4, str(folder / "cwd" / "there"))
    assert spec.environment == {"A": "1", "B": "2"}


def test_flags_alone_make_a_job(folder: Path) -> None:
    spec = job_from_flags({"command": ("train.py",), "nodes": 3}, base=folder)
    assert (spec.name, spec.nodes, spec.run_dir) == ("train", 3, str(folder / "runs/train"))


def test_a_module_needs_no_file(tmp_path: Path) -> None:
    spec = job_from_flags({"command": ("-m", "package.train")}, base=tmp_path)
    assert (spec.name, spec.command) == ("package.train", ("-m", "package.train"))


def test_a_spec_from_python_is_resolved_and_checked(folder: Path) -> None:
    spec = resolve_job(JobSpec(name="x", command=("train.py",), run_dir="runs/x"), base=folder)
    assert (spec.command, spec.run_dir) == ((str(folder / "train.py"),), str(folder / "runs/x"))
    with pytest.raises(UsageError, match="nodes is 0"):
        resolve_job(JobSpec(name="x", command=("train.py",), run_dir="runs/x", nodes=0), base=folder)


def test_command_may_be_one_text(folder: Path) -> None:
    spec = load_job(write(folder, "command = \"train.py --name 'a b'\""))
    assert spec.command == (str(folder / "train.py"), "--name", "a b")


def test_numbers_are_taken_where_slurm_has_them(folder: Path) -> None:
    spec = load_job(write(folder, 'command = ["train.py", "--layers", 4]\ntime = 30\nmem = 0\narray = 3'))
    assert (spec.time, spec.mem, spec.array, spec.command[1:]) == ("30", "0", "3", ("--layers", "4"))


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        ("gpus_per_node = 8", "unknown key 'gpus_per_node'", "did you mean 'gpus-per-node'?"),
        ("nods = 4", "unknown key 'nods'", "did you mean 'nodes'?"),
        ('zzz = "x"', "unknown key 'zzz'", "use one of: account"),
        ('nodes = "4"', "nodes takes a whole number, not text", "nodes = 4"),
        ("nodes = true", "nodes takes a whole number, not true or false", "nodes = 4"),
        ("checkpoint.every = 1.5", 'checkpoint.every takes a number of steps, a time, or "auto"', '100, "10min"'),
        ("checkpoint.every = 00:10:00", "not a TOML time or date", '100, "10min" or "auto"'),
        ("requeue = 1", "requeue takes a true or false, not a number", "requeue = true"),
        ("time = 01:00:00", "time takes a text or number, not a TOML time or date", 'time = "text in quotes"'),
        ("checkpoint = 5", "'checkpoint' is a table", "write [checkpoint]"),
        ("hetjob = true", "heterogeneous jobs are not supported", "dependency"),
        ("nodes = = 4", "not valid TOML", ""),
    ],
)
def test_bad_keys_and_types_name_the_line(folder: Path, line: str, what: str, fix: str) -> None:
    error = refused(folder, f'# a job\ncommand = ["train.py"]\n{line}\n')
    assert what in error.what
    assert fix in (error.fix or "")
    assert error.where == f"{folder / 'job.toml'}:3"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[checkpoint]\nstore = "s3://b2b/x"\nevry = 5', 4),
        ("checkpoint = { evry = 5 }", 2),
        ("checkpoint.evry = 5", 2),
    ],
)
def test_unknown_keys_of_a_table_name_the_line(folder: Path, text: str, line: int) -> None:
    error = refused(folder, f'command = ["train.py"]\n{text}\n')
    assert error.what == "unknown key 'checkpoint.evry'"
    assert error.fix == "did you mean 'every'?"
    assert error.where in {f"{folder / 'job.toml'}:{line}", str(folder / "job.toml")}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("nodes = 0", "nodes is 0"),
        ("gpus-per-node = -1", "gpus-per-node is -1"),
        ('time = "24h"', "'24h' is not a Slurm time"),
        ('mem = "1.5G"', "'1.5G' is not a Slurm size"),
        ('signal = "B:USR1:90"', "is not what --signal takes"),
        ('signal = "B:KILL@60"', "no script can catch KILL"),
        ('stop-signal = "NOPE"', "is not a signal"),
        ('stop-signal = "SIGKILL"', "no script can catch"),
        ('array = "3-1"', "is not what --array takes"),
        ('job-name = "a\\nb"', "line break"),
        ('partition = ""', "partition is empty"),
        ('run-dir = ""', "run-dir is empty"),
        ('run-dir = "/"', "root folder"),
        ('run-dir = "runs/%j"', "holds '%'"),
        ('[checkpoint]\nstore = "/fsx/x"', "not a place in S3"),
        ("[checkpoint]\nevery = 0", "checkpoint.every is 0"),
        ('[checkpoint]\nevery = "10m"', "m could be minutes or months"),
        ('[checkpoint]\nevery = "often"', "checkpoint.every: 'often' is not a duration"),
        ('[checkpoint]\nkeep-for = "7"', "checkpoint.keep-for: '7' is not a duration"),
        ("[checkpoint]\nkeep-every = 0", "checkpoint.keep-every is 0"),
        ('[checkpoint]\nmirror = "rsync"', "checkpoint.mirror 'rsync'"),
        ("[checkpoint]\nmirror-mbps = 0", "checkpoint.mirror-mbps is 0"),
        ('[environment]\n"A-B" = "1"', "'A-B' is not a variable's name"),
        ('[environment]\nPCTOOL_RUN_DIR = "1"', "PCTOOL_RUN_DIR is set by pctool"),
    ],
)
def test_bad_values_are_refused(folder: Path, text: str, what: str) -> None:
    error = refused(folder, f'command = ["train.py"]\n{text}\n')
    assert what in error.what
    assert str(folder / "job.toml") in (error.where or "")


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ('["gone.py"]', "gone.py is not there"),
        ('["."]', "is not a file"),
        ("[]", "the job has no command"),
        ('["python", "train.py"]', "begins with 'python'"),
        ('["torchrun", "train.py"]', "begins with 'torchrun'"),
        ('["--lr", "3"]', "begins with the option '--lr'"),
        ('["train.py", "a\\r\\nb"]', "no batch script can"),
    ],
)
def test_bad_commands_are_refused(folder: Path, command: str, what: str) -> None:
    assert what in refused(folder, f"command = {command}\n").what


@pytest.mark.parametrize(
    ("text", "every"),
    [("100", 100), ('"100"', 100), ('"300s"', "300s"), ('"10min"', "10min"), ('"auto"', "auto")],
)
def test_every_is_steps_or_a_time(folder: Path, text: str, every: int | str) -> None:
    spec = load_job(write(folder, f'command = ["train.py"]\n[checkpoint]\nevery = {text}\nkeep-for = "7d"\n'))
    assert (spec.checkpoint_every, spec.checkpoint_keep_for) == (every, "7d")


def test_a_misspelt_auto_is_recognised(folder: Path) -> None:
    error = refused(folder, 'command = ["train.py"]\n[checkpoint]\nevery = "atuo"')
    assert error.fix == 'did you mean "auto"?'


def test_an_underscore_in_a_key_is_recognised(folder: Path) -> None:
    error = refused(folder, 'command = ["train.py"]\n[checkpoint]\nkeep_for = "7d"')
    assert (error.what, error.fix) == ("unknown key 'checkpoint.keep_for'", "did you mean 'keep-for'?")


def test_a_missing_job_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the job file"):
        load_job(tmp_path / "none.toml")


words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(
    lambda text: "\r\n" not in text
)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}", fullmatch=True).filter(lambda name: not name.startswith("PCTOOL_"))
specs = st.builds(
    JobSpec,
    name=st.text("ab c#'\"é\\", min_size=1).filter(str.strip),
    command=st.lists(words, max_size=3).map(lambda rest: ("/x/train.py", *rest)),
    run_dir=st.just("/fsx/run with blank"),
    nodes=st.integers(1, 100),
    requeue=st.booleans(),
    time=st.sampled_from([None, "30", "1-00:00:00"]),
    checkpoint_every=st.none() | st.integers(1, 9) | st.sampled_from(["300s", "10min", "auto"]),
    checkpoint_keep_for=st.sampled_from([None, "7d"]),
    checkpoint_keep_every=st.none() | st.integers(1, 10**5),
    environment=st.dictionaries(names, words, max_size=3),
)


@given(specs)
def test_dump_reads_back_to_the_same_spec(spec: JobSpec) -> None:
    values = parse_job(dump_job(spec), where="dump")
    assert JobSpec(**values) == spec
