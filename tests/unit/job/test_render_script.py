"""The batch script: golden texts compared whole, shellcheck, quoting, templates of one's own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pctool.errors import UsageError
from pctool.job.render import render_script, sbatch_quote, sh_words
from pctool.spec.job import JobSpec

SMALL = JobSpec(name="gpt", command=("/fsx/me/train.py", "--lr", "3e-4"), run_dir="/fsx/me/runs/gpt", nodes=4)
FULL = JobSpec(
    name="it's a #1 job",
    command=("/fsx/my code/train.py", "--prompt", 'say "it\'s $HOME"', ""),
    run_dir="/fsx/my runs/gpt",
    nodes=16,
    gpus_per_node=8,
    ranks_per_node=4,
    cpus_per_task=96,
    mem="0",
    partition="p5spot",
    time="2-00:00:00",
    output="/fsx/my runs/%x-%A_%a.out",
    requeue=False,
    signal="B:USR2@120",
    constraint="p5.48xlarge&efa",
    account="team a",
    qos="high",
    exclusive=True,
    array="0-7%2",
    dependency="afterok:12?afterany:13",
    chdir="/fsx/my code",
    python="/fsx/env/bin/python",
    wait=30,
    stop_signal="TERM",
    max_stalled=5,
    checkpoint_store="s3://bucket/pre fix",
    checkpoint_every=100,
    checkpoint_keep=3,
    checkpoint_keep_for="7d",
    checkpoint_keep_every=10000,
    checkpoint_mirror="dra",
    checkpoint_mirror_mbps=200,
    environment={"NCCL_DEBUG": "INFO", "GREETING": "a 'b' $C"},
)
SPECS = {"small": SMALL, "full": FULL}


def render(spec: JobSpec) -> str:
    return render_script(spec, interpreter="/opt/my env/bin/python")


@pytest.mark.parametrize("name", SPECS)
def test_script_is_the_golden_one(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"sbatch/{name}.sbatch", render(SPECS[name]))


@pytest.mark.parametrize("name", SPECS)
def test_shellcheck_finds_nothing(name: str, tmp_path: Path) -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    path = tmp_path / "script.sh"
    path.write_text(render(SPECS[name]))
    # SC2016: a value may hold a `$` that is meant as one
    done = subprocess.run([shellcheck, "--exclude=SC2016", str(path)], capture_output=True, text=True, check=False)
    assert done.stdout == ""


def test_directives_stand_before_the_first_command() -> None:
    lines = render(FULL).splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[: last + 1])


shell_text = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"))


@settings(deadline=None, max_examples=40)
@given(st.lists(shell_text, max_size=20))
def test_shell_words_come_back_from_bash(words: list[str]) -> None:
    script = f"printf '%s\\0' {sh_words(words)}"
    done = subprocess.run(["bash"], input=script.encode(), capture_output=True, check=True)
    expected = words or [""]  # printf prints its format once where there is no word
    assert done.stdout.decode().split("\0")[:-1] == expected


@settings(deadline=None, max_examples=40)
@given(arguments=st.lists(shell_text, max_size=4), value=shell_text, directory=st.text("a b'\"$#;", min_size=1))
def test_rendered_values_come_back_from_bash(arguments: list[str], value: str, directory: str) -> None:
    spec = replace(
        SMALL, command=("/x/train.py", *arguments), environment={"VALUE": value}, run_dir=f"/fsx/{directory}"
    )
    script = render(spec)
    # what the script would run is printed instead: claim's arguments, then srun's, then the variable
    fakes = (
        'srun() { while [[ $1 != launch ]]; do shift; done; printf \'%s\\0\' "$@" "$VALUE"; }\n'
        "claim() { printf '%s\\0' \"$@\" >&2; echo export PCTOOL_RUN_DIR=/r PCTOOL_ATTEMPT=3; }\n"
    )
    body = script.split("set -u\n", 1)[1].replace("pctool=('/opt/my env/bin/python' -m pctool)", "pctool=(claim)")
    body = body.replace('"${pctool[@]}" decide', ": decide")
    done = subprocess.run(["bash"], input=(fakes + body).encode(), capture_output=True, check=True)
    launch = done.stdout.decode().split("\0")[:-1]
    assert launch == ["launch", "--nproc-per-node", "1", "--", "/x/train.py", *arguments, value]
    assert done.stderr.decode().split("\0")[:2] == ["claim", f"/fsx/{directory}"]


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\0b"])
def test_a_line_break_cannot_be_an_sbatch_value(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be a value of sbatch"):
        sbatch_quote(text)


def own(tmp_path: Path, text: str) -> JobSpec:
    path = tmp_path / "mine.sbatch.j2"
    path.write_text(text)
    return replace(SMALL, template=str(path))


def test_a_template_of_ones_own_is_used(tmp_path: Path) -> None:
    spec = own(tmp_path, "#!/bin/bash\n#SBATCH -N {{ job.nodes }}\nmodule load cuda\n{{ launch | sh_words }}\n")
    assert render(spec).splitlines()[1:3] == ["#SBATCH -N 4", "module load cuda"]


@pytest.mark.parametrize(
    ("text", "what", "line"),
    [
        ("#!/bin/bash\n{{ job.nods }}\n", "no attribute 'nods'", ":2"),
        ("#!/bin/bash\n\n{{ nothing }}\n", "'nothing' is undefined", ":3"),
        ("#!/bin/bash\n{% if %}\n", "template:", ":2"),
        ("#!/bin/bash\n{% include 'other.j2' %}\n", "no loader", ":2"),
        ('#!/bin/bash\n{{ job.nodes + "a" }}\n', "unsupported operand", ":2"),
        ("#!/bin/bash\n\n{{ job.nodes / 0 }}\n", "division by zero", ":3"),
        ("#!/bin/bash\n{{ job.nodes | round(method='up') }}\n", "method must be", ":2"),
        ("\n#!/bin/bash\n", "does not begin with #!", ""),
        ("#!/bin/bash\n#SBATCH -N 1\n#SBATCH hetjob\n", "heterogeneous", ""),
        ("#!/bin/bash\n#SBATCH packjob\n", "heterogeneous", ""),
        ("#!/bin/bash\n#SBATCH --het-group=1\n", "heterogeneous", ""),
    ],
)
def test_bad_templates_are_refused(tmp_path: Path, text: str, what: str, line: str) -> None:
    spec = own(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        render(spec)
    assert what in caught.value.what
    assert caught.value.where == f"{spec.template}{line}"


def test_a_missing_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the template"):
        render(replace(SMALL, template=str(tmp_path / "none.j2")))


def run_with_fakes(tmp_path: Path, srun: str, send: str = "") -> subprocess.CompletedProcess[str]:
    """Run the rendered script with fakes; `send` runs in srun first, where $script is the script's pid."""
    attempt = tmp_path / "run" / "attempts" / "000000"
    attempt.mkdir(parents=True)
    fakes = {
        "srun": f"script=$(awk '/^PPid/ {{print $2}}' /proc/$PPID/status)\n{send}\n{srun}",
        "scontrol": "echo '   StartTime=2026-01-01T00:00:00 EndTime=2026-01-01T01:00:00 Deadline=N/A'",
        "python": f"""case "$3" in
            claim) echo export PCTOOL_RUN_DIR={tmp_path}/run PCTOOL_ATTEMPT=0;;
            decide) echo "decide $*"; exit "${{!#}}";;
        esac""",
    }
    for name, text in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "script.sh"
    spec = replace(SMALL, run_dir=str(tmp_path / "run"))
    script.write_text(render_script(spec, interpreter=str(tmp_path / "python")))
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "TZ": "UTC"}
    return subprocess.run(["bash", str(script)], env=environ, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("code", [0, 1, 85, 127, 137])
def test_the_steps_own_code_reaches_decide_and_its_code_is_the_scripts(tmp_path: Path, code: int) -> None:
    done = run_with_fakes(tmp_path, f"exit {code}")
    assert done.returncode == code
    assert f"--srun-code {code}" in done.stdout
    assert not (tmp_path / "run/attempts/000000/stop").exists()


def test_a_signal_leaves_a_note_and_the_step_goes_on(tmp_path: Path) -> None:
    # srun signals the script twice and ends only when the note is there
    wait = f"while [ ! -e {tmp_path}/run/attempts/000000/stop ]; do sleep 0.02; done"
    done = run_with_fakes(tmp_path, "exit 5", send=f"kill -USR1 $script; {wait}; kill -USR1 $script")
    assert done.returncode == 5, done.stderr
    note = (tmp_path / "run/attempts/000000/stop").read_text()
    assert note == '{"why":"time-limit","who":"slurm","deadline":1767229200,"requeue":true}\n'
    assert sorted(path.name for path in (tmp_path / "run/attempts/000000").iterdir()) == ["stop"]


def test_a_signal_at_the_very_end_does_not_lose_the_code(tmp_path: Path) -> None:
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        done = run_with_fakes(folder, "exit 5", send="kill -USR1 $script; kill -USR1 $script")
        assert done.returncode == 5, done.stdout


def test_a_note_that_is_there_is_kept(tmp_path: Path) -> None:
    stop = tmp_path / "run/attempts/000000/stop"
    done = run_with_fakes(tmp_path, "exit 0", send=f"echo mine > {stop}; kill -USR1 $script; sleep 0.3")
    assert done.returncode == 0
    assert stop.read_text() == "mine\n"
