"""Parsers on output captured from the real Slurm, and on hostile text."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pctool.errors import SlurmError
from pctool.slurm.command import Completed, failed
from pctool.slurm.comment import format_comment, parse_comment
from pctool.slurm.parse import (
    parse_config,
    parse_exit_codes,
    parse_fields,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_queue,
    parse_timestamp,
    parse_version,
)

CAPTURED = Path(__file__).parent / "captured"
VERSIONS = sorted(path.name for path in CAPTURED.iterdir())


def captured(version: str, name: str) -> str:
    return (CAPTURED / version / name).read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_requeued_job_that_waits(version: str) -> None:
    job = parse_jobs(captured(version, "jobs.txt"))[0]
    assert (job.job_id, job.name, job.user, job.label) == ("1", "my job", "root", "1")
    assert (job.state, job.requeue, job.restarts, job.exit_code) == ("PENDING", True, 1, 85)
    assert not job.held
    assert job.eligible_time is not None
    assert job.submit_time is not None
    expire = re.search(r"cred_expire=(\d+)", parse_config(captured(version, "config.txt"))["AuthInfo"])
    assert expire is not None
    assert job.eligible_time - job.submit_time - int(expire[1]) in {0, 1}
    assert (job.end_time is None) == (job.time_limit is None) == (version == "22.05")
    assert job.std_out == "/home/ada/o-1.out"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_comment_with_spaces_and_an_equals_sign_stays_whole(version: str) -> None:
    job = parse_jobs(captured(version, "jobs.txt"))[0]
    assert job.comment == "pctool:/home/ada/my run Reason=fake"
    assert job.reason in {"NonZeroExitCode", "BeginTime"}


@pytest.mark.parametrize("version", VERSIONS)
def test_array_tasks_held_and_running_jobs(version: str) -> None:
    jobs = {job.label: job for job in parse_jobs(captured(version, "jobs.txt"))}
    assert set(jobs) == {"1", "2_1", "2_2", "3", "4", "5"}
    assert (jobs["2_1"].state, jobs["2_1"].num_nodes, jobs["2_1"].time_limit) == ("RUNNING", 2, 600)
    assert (jobs["2_1"].node_list, jobs["2_1"].batch_host) == ("q1-dy-cr1-[1-2]", "q1-dy-cr1-1")
    assert jobs["2_1"].comment is None
    assert jobs["5"].held
    assert not jobs["4"].held
    assert jobs["3"].num_nodes == 9


@pytest.mark.parametrize("version", VERSIONS)
def test_node_partition_and_config(version: str) -> None:
    (node,) = parse_nodes(captured(version, "node.txt"))
    assert (node.name, node.addr, node.cpus, node.real_memory_mib) == ("q1-dy-cr1-1", "127.0.0.1", 16, 100000)
    assert node.features == ("dynamic", "cr1", "p5.48xlarge")
    assert "MIXED" in node.states
    assert node.version is not None
    assert node.version.startswith(version)
    assert node.gres == "gpu:h100:8"
    (partition,) = parse_partitions(captured(version, "partition.txt"))
    assert (partition.name, partition.default, partition.up, partition.total_nodes) == ("q1", True, True, 4)
    assert (partition.max_nodes, partition.max_time, partition.nodes) == (None, None, "q1-dy-cr1-[1-4]")
    config = parse_config(captured(version, "config.txt"))
    assert config["AuthInfo"].startswith("socket=/home/ada/pc/munge/")
    assert (config["RequeueExit"], config["RequeueExitHold"], config["JobFileAppend"]) == ("85", "86", "1")
    assert config["SrunProlog"] == ""


def test_node_states_lose_their_marks() -> None:
    (node,) = parse_nodes(
        "NodeName=a Arch=x\n   State=IDLE*+CLOUD+DRAIN+POWERED_DOWN ThreadsPerCore=1\n   Reason=x [y]\n"
    )
    assert node.states == {"IDLE", "CLOUD", "DRAIN", "POWERED_DOWN"}
    assert node.reason == "x [y]"


def test_a_record_without_a_state_is_an_error() -> None:
    with pytest.raises(SlurmError, match="JobState"):
        parse_jobs("JobId=1 JobName=x\n   UserId=a(1) GroupId=a(1)\n")


def test_queue_lines_keep_the_comment_whole() -> None:
    lines = parse_queue("2_1|6|RUNNING|None|pctool:/a b|c\n3|3|PENDING|BeginTime|(null)\ngarbage\n")
    assert [(line.label, line.job_id, line.comment) for line in lines] == [
        ("2_1", "6", "pctool:/a b|c"),
        ("3", "3", None),
    ]


@pytest.mark.parametrize(
    ("text", "version"),
    [("slurm-wlm 22.05.8", (22, 5)), ("slurm 25.11.8", (25, 11)), ("slurm 24.11.5\n", (24, 11))],
)
def test_version(text: str, version: tuple[int, int]) -> None:
    assert parse_version(text) == version


def test_version_of_something_else() -> None:
    with pytest.raises(SlurmError, match="not a Slurm version"):
        parse_version("pbs_version = 19.0")


@pytest.mark.parametrize(
    ("text", "codes"), [("85", {85}), ("1,5-7", {1, 5, 6, 7}), ("", set()), ("(null)", set()), ("85,86", {85, 86})]
)
def test_exit_codes(text: str, codes: set[int]) -> None:
    assert parse_exit_codes(text) == codes


def test_timestamps_are_local_time() -> None:
    now = float(int(time.time()))
    assert parse_timestamp(time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now))) == now
    assert parse_timestamp("Unknown") is None
    assert parse_timestamp(None) is None


@given(st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"])))
def test_free_text_takes_the_rest_of_its_line(text: str) -> None:
    assert parse_fields(f"   Requeue=1 Comment={text}") == {"Requeue": "1", "Comment": text.strip()}


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1), st.text(min_size=0))
def test_a_comment_brings_the_run_directory_back(run_dir: str, note: str) -> None:
    comment = format_comment(f"/{run_dir}", note)
    assert "\n" not in comment
    found = parse_comment(comment)
    assert found is not None
    assert found.run_dir == f"/{run_dir}"
    assert found.note == " ".join(note.split())


@pytest.mark.parametrize("text", [None, "", "sweep 7", "xpctool:/a"])
def test_a_comment_of_someone_else(text: str | None) -> None:
    assert parse_comment(text) is None


def test_a_plain_path_is_written_as_it_is() -> None:
    assert format_comment("/fsx/ada/run-1") == "pctool:/fsx/ada/run-1"
    assert format_comment("/fsx/my run", "held: x") == "pctool:/fsx/my%20run held: x"


def test_a_command_without_a_cluster_says_where_there_is_one() -> None:
    said = "sinfo: error: resolve_ctls_from_dns_srv: ...\nsinfo: fatal: Could not establish a configuration source\n"
    error = failed(Completed(("sinfo",), 1, "", said))
    assert error.fix is not None
    assert "SLURM_CONF" in error.fix
