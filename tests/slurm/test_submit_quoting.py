"""What #SBATCH lines say, asked of the real sbatch. No daemon is needed: sbatch reads the script before it connects."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pctool.job.render import render_script, sbatch_quote
from pctool.spec.job import JobSpec

pytestmark = pytest.mark.slurm

# Nobody listens on port 1: nothing is ever submitted.
CONF = """ClusterName=none
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=1
AuthType=auth/none
GresTypes=gpu
SelectType=select/cons_tres
NodeName=n1
PartitionName=p Nodes=n1 Default=YES
"""
values = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=12)
awkward = st.text(" \\\"'#$`%=,&|*[]()<>!~;:-", max_size=8)


@pytest.fixture(scope="module")
def sbatch_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    conf = tmp_path_factory.mktemp("conf") / "slurm.conf"
    conf.write_text(CONF)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    return {**clean, "SLURM_CONF": str(conf)}


def ask(script: Path, env: dict[str, str]) -> str:
    """Return what sbatch says of a script; it is ended before it tries, for seconds, to reach a controller."""
    said = []
    with subprocess.Popen(["sbatch", "-vvv", str(script)], env=env, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line.decode())
            if "end of defined options" in said[-1]:
                process.kill()
                break
    return "".join(said)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(values | awkward, min_size=40, max_size=120))
def test_sbatch_reads_every_value_as_it_was(texts: list[str], sbatch_env: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    lines = [f"#SBATCH --comment={sbatch_quote(text)}" for text in texts]
    script.write_text("\n".join(["#!/bin/bash", *lines, "true", ""]))
    said = ask(script, sbatch_env)
    assert re.findall(r'Found in script, argument "--comment=(.*)"\n', said) == texts


def test_sbatch_understands_every_directive_of_the_template(sbatch_env: dict[str, str], tmp_path: Path) -> None:
    spec = JobSpec(
        name="it's a #1 job",
        command=("/x/train.py",),
        run_dir=str(tmp_path / "my run"),
        nodes=3,
        gpus_per_node=8,
        cpus_per_task=96,
        mem="0",
        partition="p",
        time="1-00:00:00",
        requeue=False,
        signal="B:USR2@120",
        constraint="p5.48xlarge&efa",
        account="team a",
        qos="high",
        exclusive=True,
        array="0-7%2",
        dependency="afterok:12?afterany:13",
        chdir="/tmp",
    )
    script = tmp_path / "script.sh"
    script.write_text(render_script(spec, interpreter="/opt/python"))
    options = dict(re.findall(r"^sbatch: ([\w-]+) +: (.*)$", ask(script, sbatch_env), re.MULTILINE))
    assert options == {
        "account": "team a",
        "array": "0-7%2",
        "chdir": "/tmp",
        "comment": f"pctool:{tmp_path}/my%20run/task-%25a",
        "constraint": "p5.48xlarge&efa",
        "cpus-per-task": "96",
        "dependency": "afterok:12?afterany:13",
        "exclusive": "exclusive",
        "gpus-per-node": "8",
        "job-name": "it's a #1 job",
        "mem": "0?",  # as sbatch prints 0, all of the node
        "nodes": "3",
        "no-requeue": "no-requeue",
        "ntasks-per-node": "1",
        "open-mode": "a",
        "output": f"{tmp_path}/my run/logs/slurm-%A_%a.out",
        "partition": "p",
        "qos": "high",
        "signal": "B:USR2@120",
        "time": "1-00:00:00",
        "verbose": "3",
    }
