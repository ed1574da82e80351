"""The plan: what it holds, what it warns of, and what it refuses of a cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pctool.errors import UsageError
from pctool.job.array import parse_array
from pctool.job.load import parse_job
from pctool.job.plan import make_plan, output_path, plan_document, plan_text
from pctool.spec.cluster import ClusterView, ComputeResourceView, QueueView
from pctool.spec.job import JobSpec

JOB = JobSpec(name="gpt", command=("/fsx/train.py",), run_dir="/fsx/runs/gpt", cpus_per_task=8)


def resource(**changes: Any) -> ComputeResourceView:
    values: dict[str, Any] = {
        "name": "p5",
        "queue": "p5spot",
        "instance_types": ("p5.48xlarge",),
        "min_count": 0,
        "max_count": 4,
        "cpus": 192,
        "real_memory_mib": 1992294,
        "gpu_type": "h100",
        "gpus": 8,
    }
    return ComputeResourceView(**{**values, **changes})


def view(*resources: ComputeResourceView, **changes: Any) -> ClusterView:
    values: dict[str, Any] = {"name": "p5spot", "capacity_type": "SPOT", "default": True}
    queue = QueueView(**{**values, **changes}, compute_resources=resources or (resource(),))
    other = QueueView(
        name="cpu", capacity_type="ONDEMAND", compute_resources=(resource(name="c", queue="cpu", gpus=0),)
    )
    return ClusterView(source="cluster.yaml", queues=(other, queue), slurm_version=(25, 11))


def test_plan_holds_script_command_folders_and_the_spec() -> None:
    plan = make_plan(JOB, slurm_version=(22, 5))
    assert plan.argv[0] == "sbatch"
    assert plan.directories == ("/fsx/runs/gpt", "/fsx/runs/gpt/logs", "/fsx/runs/gpt/logs/submitit")
    assert list(plan.files) == ["/fsx/runs/gpt/job.toml"]
    assert JobSpec(**parse_job(plan.files["/fsx/runs/gpt/job.toml"], where="")) == plan.spec == JOB
    assert plan.script.startswith("#!/bin/bash\n")
    assert plan.warnings == ()


def test_each_task_of_an_array_has_a_run_directory() -> None:
    plan = make_plan(replace(JOB, array="1,3"))
    assert {"/fsx/runs/gpt/task-1", "/fsx/runs/gpt/task-3"} <= set(plan.directories)
    assert set(plan.files) == {f"/fsx/runs/gpt/{where}job.toml" for where in ("", "task-1/", "task-3/")}
    assert 'run="$run/task-$SLURM_ARRAY_TASK_ID"' in plan.script
    assert "--comment=pctool:/fsx/runs/gpt/task-%25a" in plan.script


def test_output_folder_is_made_and_the_output_found_again() -> None:
    spec = replace(JOB, output="/fsx/logs/%x-%u/%j.out")
    assert "/fsx/logs/gpt-ann" in make_plan(spec, user="ann").directories
    assert str(output_path(spec, "12", "ann")) == "/fsx/logs/gpt-ann/12.out"
    assert str(output_path(replace(JOB, array="0-3"), "12_3", "ann")) == "/fsx/runs/gpt/logs/slurm-12_3.out"


@pytest.mark.parametrize(
    ("pattern", "job_id", "path"),  # as Slurm 22.05.8 names them
    [
        ("%5j-%05j-%0j-%5J-%3A", "39", "00039-00039-39-00039-039"),
        ("%12j", "33", "0000000033"),  # ten digits at most
        ("%4A-%4a", "12_3", "0012-0003"),
        ("%5x-%5u-%5%-%%", "39", "gpt-ann-5%-%"),  # a text is not padded
        ("%A-%a", "39", "39-4294967294"),  # no task of an array
    ],
)
def test_padded_names_of_the_output(pattern: str, job_id: str, path: str) -> None:
    spec = replace(JOB, output=f"/fsx/%8x %%/{pattern}")
    assert "/fsx/gpt %" in make_plan(spec, user="ann").directories
    assert str(output_path(spec, job_id, "ann")) == f"/fsx/gpt %/{path}"


@pytest.mark.parametrize("folder", ["%4a", "%5j"])
def test_a_padded_output_folder_known_too_late_is_refused(folder: str) -> None:
    with pytest.raises(UsageError, match="known only once the job runs"):
        make_plan(replace(JOB, output=f"/fsx/{folder}/out"))


def test_srun_is_not_told_to_wait_for_ever() -> None:
    with pytest.raises(UsageError, match="wait is 0") as error:
        make_plan(replace(JOB, wait=0))  # srun takes 0 for "without an end"
    assert error.value.fix == "use at least 1"


def test_an_output_folder_known_too_late_is_refused() -> None:
    with pytest.raises(UsageError, match="known only once the job runs"):
        make_plan(replace(JOB, output="/fsx/%j/out"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"signal": "USR1@120"}, "use B:USR1@120"),
        ({"signal": "B:USR1@300", "time": "5"}, "as soon as it starts"),
        ({"run_dir": "/tmp/x"}, "/tmp/x is on a file system that each node has for itself"),
        ({"cpus_per_task": None}, "one CPU a node"),
        ({"checkpoint_keep": 1}, "checkpoint.keep = 1"),
        ({"checkpoint_keep_every": 1000}, "checkpoint.keep-every alone removes nothing"),
        ({"checkpoint_mirror": "dra"}, "mean nothing without checkpoint.store"),
    ],
)
def test_what_is_allowed_but_unwise_is_a_warning(changes: dict[str, Any], words: str) -> None:
    (warning,) = make_plan(replace(JOB, **changes)).warnings
    assert words in warning


def test_a_spot_queue_without_requeue_is_a_warning() -> None:
    (warning,) = make_plan(replace(JOB, gpus_per_node=8, partition="p5spot", requeue=False), view=view()).warnings
    assert "spot" in warning


def test_no_gpus_in_a_queue_that_has_them_is_a_warning() -> None:
    (warning,) = make_plan(JOB, view=view()).warnings
    assert "its ranks will see none; use gpus-per-node = 8" in warning
    assert make_plan(replace(JOB, exclusive=True), view=view()).warnings == ()
    assert make_plan(JOB, view=view(exclusive=True)).warnings == ()
    assert make_plan(replace(JOB, partition="cpu"), view=view()).warnings == ()


def test_any_folder_is_shared_where_all_nodes_are_this_machine() -> None:
    spec = replace(JOB, run_dir="/tmp/x", gpus_per_node=8)
    assert len(make_plan(spec, view=view()).warnings) == 1
    assert make_plan(spec, view=replace(view(), one_machine=True)).warnings == ()


@pytest.mark.parametrize(
    ("changes", "what", "fix"),
    [
        ({"partition": "p5sopt"}, "no partition 'p5sopt'", "did you mean 'p5spot'?"),
        ({"partition": "x"}, "no partition 'x'", "use one of: cpu, p5spot"),
        ({"nodes": 5}, "asks for 5 nodes, but partition 'p5spot' has 4", "nodes = 4"),
        ({"gpus_per_node": 9}, "gpus-per-node = 9", "at most 8"),
        ({"gpus_per_node": 1, "partition": "cpu"}, "gpus-per-node = 1", "at most 0"),
        ({"cpus_per_task": 193}, "cpus-per-task = 193", "at most 192"),
        ({"mem": "2T"}, "mem (MiB) = 2097152", "mem = 0"),
    ],
)
def test_what_the_cluster_lacks_is_refused(changes: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_plan(replace(JOB, **changes), view=view())
    assert what in caught.value.what
    assert fix in (caught.value.fix or "")
    assert caught.value.where == "cluster.yaml"


def test_nodes_that_lack_something_do_not_count() -> None:
    mixed = view(resource(max_count=2), resource(name="small", gpus=4, max_count=8))
    with pytest.raises(UsageError, match="only 2 nodes"):
        make_plan(replace(JOB, gpus_per_node=8, nodes=4), view=mixed)


def test_a_partitions_own_limit_holds() -> None:
    with pytest.raises(UsageError, match="has 2"):
        make_plan(replace(JOB, nodes=3), view=view(custom_settings={"MaxNodes": "2"}))


@pytest.mark.parametrize(("gpus", "cpus"), [(8, 192), (2, 48), (1, 24)])
def test_cpus_follow_the_gpus_where_the_cluster_is_known(gpus: int, cpus: int) -> None:
    plan = make_plan(replace(JOB, cpus_per_task=None, gpus_per_node=gpus), view=view())
    assert plan.spec.cpus_per_task == cpus
    assert f"#SBATCH --cpus-per-task={cpus}\n" in plan.script
    assert any(f"{cpus} are asked for" in warning for warning in plan.warnings)


@pytest.mark.parametrize("changes", [{"exclusive": True}, {"cpus_per_task": 3}])
def test_cpus_asked_for_are_left_alone(changes: dict[str, Any]) -> None:
    spec = replace(JOB, cpus_per_task=None, gpus_per_node=8)
    assert make_plan(replace(spec, **changes), view=view()).spec == replace(spec, **changes)
    assert make_plan(spec, view=view(exclusive=True)).spec == spec


def test_an_old_slurm_is_refused_and_a_newer_one_warned_of() -> None:
    with pytest.raises(UsageError, match=r"Slurm 21\.08 is too old"):
        make_plan(JOB, slurm_version=(21, 8))
    assert "newer than 26.05" in make_plan(JOB, slurm_version=(26, 11)).warnings[0]


def test_the_printed_plan_tells_all() -> None:
    plan = make_plan(replace(JOB, array="0-9"), interpreter="/opt/python")
    text = plan_text(plan)
    assert all(part in text for part in (*plan.directories, plan.script.rstrip("\n"), "(and 10 copies, one a task)"))
    document = plan_document(plan)
    assert document["script"] == plan.script
    assert document["job"]["job-name"] == "gpt"


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("3", (3,)),
        ("0-3", (0, 1, 2, 3)),
        ("0-6:2,9%2", (0, 2, 4, 6, 9)),
        ("5,1", (1, 5)),
        ("0-99999", tuple(range(100_000))),
    ],
)
def test_arrays_are_read_as_sbatch_does(text: str, tasks: tuple[int, ...]) -> None:
    assert parse_array(text) == tasks


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1-5:0", "1%", "1%x", "1,,2", "0-100000"])
def test_what_is_no_array_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="array"):
        parse_array(text)
