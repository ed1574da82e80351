"""The set-up scripts, with stand-ins for pip, Slurm and apt: what they say, when they ask, when they start no pip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = (
    *("awk", "bash", "cat", "cut", "dirname", "env", "flock", "grep", "head", "ls", "mkdir", "mktemp", "rm", "sed"),
    *("sha256sum", "sleep", "sort", "tail", "touch", "tr", "true", "uname"),
)
SLURM = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue")


class Machine:
    """A machine with only a few programs on PATH, and a checkout that is set up in a stand-in environment."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "bin"
        self.path.mkdir()
        for tool in TOOLS:
            (self.path / tool).symlink_to(shutil.which(tool) or pytest.fail(f"no {tool} here"))
        self.checkout = folder / "checkout"
        shutil.copytree(ROOT / "bootstrap", self.checkout / "bootstrap")
        shutil.copy(ROOT / "pyproject.toml", self.checkout)
        self.venv = self.checkout / ".venv"
        self.calls = folder / "calls"
        self.calls.touch()

    def program(self, name: str, script: str) -> None:
        """Put a program on PATH that notes its call and then runs `script`."""
        (self.path / name).unlink(missing_ok=True)
        self._write(self.path / name, f'#!/bin/bash\necho {name} "$@" >>{self.calls}\n{script}\n')

    def slurm(self, version: str = "22.05.8") -> None:
        for name in SLURM:
            self.program(name, f"echo slurm-wlm {version}")

    def environment(self, *, install: str = "exit 0", has_torch: bool = False) -> None:
        """Make an environment whose interpreter notes its calls, and whose `pip install` is the script `install`."""
        (self.venv / "bin").mkdir(parents=True)
        (self.venv / "pyvenv.cfg").touch()
        lines = [
            "#!/bin/bash",
            f'[[ $1 == -c ]] || echo python "$@" >>{self.calls}',
            "[[ $* == *--dry-run* ]] && exit 1",  # no torch in a folder of this machine
            f'[[ "$2 $3" == "pip install" ]] && {{ {install}; }}',
            '[[ "$2" == pip ]] && exit 0',
            f"[[ $2 == *importlib.metadata* ]] && exit {int(not has_torch)}",
            f'exec {sys.executable} "$@"',
        ]
        self._write(self.venv / "bin/python", "\n".join(lines) + "\n")

    def prepare(self, extras: str = "all", **environ: str) -> subprocess.CompletedProcess[str]:
        return self.bash(f". {self.checkout}/bootstrap/lib.sh; prepare {extras}; echo prepared", **environ)

    def bash(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        argv = ["/bin/bash", "-c", *words] if len(words) == 1 else ["/bin/bash", *words]
        env = {"PATH": str(self.path), "HOME": str(self.path.parent), "PYTHON": sys.executable, "PIP_NO_INDEX": "1"}
        return subprocess.run(
            argv,
            env={**env, **environ},
            cwd=self.path.parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def called(self, *words: str) -> list[str]:
        """Return the noted calls that hold all of `words`."""
        lines = self.calls.read_text().splitlines()
        return [line for line in lines if all(word in line for word in words)]

    @staticmethod
    def _write(path: Path, script: str) -> None:
        path.write_text(script)
        path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def as_root(machine: Machine) -> Machine:
    """Let the caller be root, one way or the other."""
    if os.geteuid() != 0:
        machine.program("sudo", 'shift; exec "$@"')
    return machine


@pytest.mark.parametrize("script", ["try.sh", "test.sh"])
def test_help_tells_the_usage_and_does_nothing(script: str) -> None:
    done = subprocess.run([ROOT / "bootstrap" / script, "--help"], cwd="/", capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"bootstrap/{script} [--yes] [--torch-index URL]" in done.stdout
    assert "lib.sh" not in done.stdout


def test_an_unknown_argument_is_a_usage_error(machine: Machine) -> None:
    done = machine.bash(f"{machine.checkout}/bootstrap/try.sh", "--scenario", "loss")
    assert (done.returncode, machine.called()) == (2, [])
    assert "unknown argument '--scenario'" in done.stderr
    assert "go after --" in done.stderr


def test_an_unknown_scope_is_a_usage_error(machine: Machine) -> None:
    done = machine.bash(f"{machine.checkout}/bootstrap/test.sh", "--scope", "most")
    assert done.returncode == 2
    assert "choose all, lint, quick or tests" in done.stderr


def test_the_second_run_starts_no_pip(machine: Machine) -> None:
    machine.slurm()
    machine.environment()
    first = machine.prepare(CI="true")
    assert (first.returncode, first.stdout) == (0, "prepared\n"), first.stderr
    assert "MB" in first.stderr
    installs = [line for line in machine.called("pip install") if "--dry-run" not in line]
    assert len(installs) == 2
    assert "torch==" in installs[0]
    assert installs[1].endswith(f"-e {machine.checkout}[all]")

    machine.calls.write_text("")
    second = machine.prepare()
    assert (second.returncode, second.stdout, second.stderr) == (0, "prepared\n", "")
    assert machine.called("pip") == []


@pytest.mark.parametrize("name", ["pyproject.toml", "bootstrap/constraints.txt"])
def test_a_change_of_what_is_installed_starts_pip_again(machine: Machine, name: str) -> None:
    machine.slurm()
    machine.environment(has_torch=True)
    machine.prepare()
    machine.calls.write_text("")
    with (machine.checkout / name).open("a") as file:
        file.write("\n# changed\n")
    assert machine.prepare().returncode == 0
    assert machine.called("pip install", "-e")


def test_what_the_tests_need_is_enough_for_a_rehearsal(machine: Machine) -> None:
    machine.slurm()
    machine.environment(has_torch=True)
    machine.prepare("dev")
    machine.calls.write_text("")
    machine.prepare("all")
    assert machine.called("pip") == []
    (machine.venv / "pctool-dev.stamp").unlink()
    machine.prepare("all")
    assert machine.called("pip", "[all]")


def test_the_torch_index_is_for_torch_alone(machine: Machine) -> None:
    machine.slurm()
    machine.environment()
    done = machine.prepare(TORCH_INDEX_URL="http://torch.invalid/cpu")
    assert "from http://torch.invalid/cpu" in done.stderr
    with_index = machine.called("--index-url http://torch.invalid/cpu")
    assert len(with_index) == 1
    assert "torch==" in with_index[0]
    assert "-e" not in with_index[0].split()


@pytest.mark.parametrize(("machine_type", "code"), [("x86_64", 2), ("aarch64", 0)])
def test_a_large_download_needs_a_yes(machine: Machine, machine_type: str, code: int) -> None:
    machine.slurm()
    machine.environment()
    machine.program("uname", f"echo {machine_type}")
    done = machine.prepare()
    assert done.returncode == code
    assert bool(machine.called("pip install", "-c")) == (code == 0)
    if code:
        assert "about 3000 MB" in done.stderr
        assert "--torch-index" in done.stderr


def test_an_old_slurm_is_refused_before_anything_is_installed(machine: Machine) -> None:
    machine.slurm("21.08.5")
    machine.environment()
    done = machine.prepare()
    assert done.returncode == 3
    assert "Slurm 21.08 is installed; pctool needs 22.05 or newer" in done.stderr
    assert machine.called("pip install") == []


def test_without_slurm_and_apt_it_says_what_to_install(machine: Machine) -> None:
    machine.environment(has_torch=True)
    done = machine.prepare(PYTHONPATH=no_slurm(machine))
    assert done.returncode == 3
    assert "install Slurm 22.05 or newer and munge" in done.stderr
    assert machine.called("pip install") == []


def test_apt_needs_a_yes(as_root: Machine) -> None:
    as_root.environment(has_torch=True)
    as_root.program("apt-get", "exit 0")
    done = as_root.prepare(PYTHONPATH=no_slurm(as_root))
    assert done.returncode == 2
    assert "apt-get install slurmctld slurmd slurm-client munge" in done.stderr
    assert "say --yes, or set CI=true" in done.stderr
    assert as_root.called("apt-get update") == []
    assert as_root.called("apt-get install -y") == []


def test_with_a_yes_apt_installs_slurm(as_root: Machine) -> None:
    as_root.environment(has_torch=True)
    as_root.program("apt-get", f"[[ $* == *' -y '* ]] && touch {as_root.path}/installed; exit 0")
    done = as_root.prepare(PYTHONPATH=no_slurm(as_root), CI="true")
    assert as_root.called("apt-get update")
    assert (as_root.path / "installed").exists()
    # the stand-in brought no Slurm, which is found out, not believed
    assert done.returncode == 3


def test_a_folder_that_is_no_environment_is_left_alone(machine: Machine) -> None:
    machine.slurm()
    machine.venv.mkdir()
    (machine.venv / "thesis.tex").write_text("years of work")
    done = machine.prepare()
    assert done.returncode == 2
    assert "is no virtual environment" in done.stderr
    assert (machine.venv / "thesis.tex").read_text() == "years of work"


def test_a_failed_step_shows_the_end_of_its_output(machine: Machine) -> None:
    machine.slurm()
    machine.environment(install="echo no room left; exit 7")
    done = machine.prepare(CI="true")
    assert done.returncode == 3
    assert "no room left" in done.stderr
    assert "installing torch: failed with code 7" in done.stderr
    assert "prepared" not in done.stdout


def no_slurm(machine: Machine) -> str:
    """Return a PYTHONPATH on which pctool finds no Slurm, whatever this machine has."""
    package = machine.checkout / "none" / "pctool" / "slurm"
    package.mkdir(parents=True)
    for init in (package / "__init__.py", package.parent / "__init__.py"):
        init.touch()
    (package / "install.py").write_text("def find_install() -> None:\n    raise SystemExit(3)\nfind_install()\n")
    return str(machine.checkout / "none")
