"""The set-up scripts, with stand-ins for pip, Slurm and apt: what they say, when they ask, when they start no pip."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pctool.slurm.private import proc

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
        self.env = {"PATH": str(self.path), "HOME": str(folder), "PYTHON": sys.executable, "PIP_NO_INDEX": "1"}

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
        self._interpreter(self.venv / "bin/python", install, has_torch)

    def python(self) -> str:
        """Return an interpreter that makes environments in a moment, whose own interpreter is a stand-in too."""
        self._interpreter(self.path / "stand-in", "exit 0", has_torch=False)
        path = self.path / "python-with-venv"
        lines = [
            f'[[ "$1 $2" == "-m venv" ]] || exec {sys.executable} "$@"',
            f'{sys.executable} -m venv --without-pip "${{@:3}}" || exit',
            f'exec {shutil.which("ln")} -sf {self.path}/stand-in "${{!#}}/bin/python"',
        ]
        self.program(path.name, "\n".join(lines))
        return str(path)

    def _interpreter(self, path: Path, install: str, has_torch: bool) -> None:
        lines = [
            "#!/bin/bash",
            f'[[ $1 == -c ]] || echo python "$@" >>{self.calls}',
            "[[ $* == *--dry-run* ]] && exit 1",  # no torch in a folder of this machine
            f'[[ "$2 $3" == "pip install" ]] && {{ {install}; }}',
            '[[ "$2" == pip ]] && exit 0',
            f"[[ $2 == *importlib.metadata* ]] && exit {int(not has_torch)}",
            f'exec {sys.executable} "$@"',
        ]
        self._write(path, "\n".join(lines) + "\n")

    def prepare(
        self, extras: str = "all", answer: str | None = None, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        script = f". {self.checkout}/bootstrap/lib.sh; prepare {extras}; echo prepared"
        return self.bash(script, answer=answer, **environ)

    def bash(self, *words: str, answer: str | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a script, at a terminal where `answer` is typed, else with an empty standard input."""
        argv = ["/bin/bash", "-c", *words] if len(words) == 1 else ["/bin/bash", *words]
        keyboard, terminal = os.openpty()
        try:
            os.write(keyboard, f"{answer}\n".encode())
            return subprocess.run(
                argv,
                env={**self.env, **environ},
                cwd=self.path.parent,
                stdin=subprocess.DEVNULL if answer is None else terminal,
                capture_output=True,
                text=True,
                timeout=60,
            )
        finally:
            os.close(keyboard)
            os.close(terminal)

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


@pytest.fixture
def precious(machine: Machine) -> Path:
    """Return a file in an environment without pip, as uv makes them."""
    machine.slurm()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", machine.venv], check=True, timeout=60)
    (machine.venv / "precious.txt").write_text("years of work")
    return machine.venv / "precious.txt"


@pytest.mark.parametrize("words", [{}, {"CI": "true"}])
def test_an_environment_of_somebody_else_is_never_cleared(
    machine: Machine, precious: Path, words: dict[str, str]
) -> None:
    (machine.venv / "pctool-all.stamp").write_text("installed into, but not made")
    done = machine.prepare(**words)
    assert done.returncode == 2
    assert "is a virtual environment that does not work, and was not made here" in done.stderr
    assert f"set PCTOOL_VENV to another folder, or remove {machine.venv}" in done.stderr
    assert precious.exists()
    assert machine.called("-m venv") == machine.called("pip") == []


def test_one_of_ours_is_made_anew_after_a_yes(machine: Machine, precious: Path, tmp_path: Path) -> None:
    (machine.venv / "pctool-made.stamp").touch()
    (tmp_path / "scratch").mkdir()
    words = {"PYTHON": machine.python(), "TMPDIR": str(tmp_path / "scratch"), "TORCH_INDEX_URL": "http://x.invalid"}
    before = sorted(machine.venv.rglob("*"))
    for answer in (None, "n"):
        refused = machine.prepare(answer=answer, **words)
        assert refused.returncode == 2
        assert "no longer works: it is emptied and made anew" in refused.stderr
        assert ("nothing was changed" in refused.stderr) == (answer == "n")
        assert sorted(machine.venv.rglob("*")) == before

    done = machine.prepare(CI="true", **words)
    assert (done.returncode, done.stdout) == (0, "prepared\n"), done.stderr
    assert not precious.exists()
    assert (machine.venv / "pctool-made.stamp").exists()
    assert [path for path in (tmp_path / "scratch").iterdir() if path.is_dir()] == []


def test_a_new_environment_is_made_only_after_the_yes(machine: Machine) -> None:
    machine.slurm()
    machine.program("uname", "echo x86_64")
    words = {"PYTHON": machine.python()}
    assert machine.prepare(**words).returncode == 2
    assert not machine.venv.exists()
    assert machine.prepare(CI="true", **words).stdout == "prepared\n"
    assert (machine.venv / "pctool-made.stamp").exists()
    assert machine.prepare(**words).stderr == ""


def test_a_torch_at_hand_is_found_before_there_is_an_environment(machine: Machine, tmp_path: Path) -> None:
    machine.slurm()
    machine.program("uname", "echo x86_64")
    python = machine.python()
    wheel = tmp_path / "torch.whl"
    wheel.write_bytes(b"x" * 7_000_000)
    report = f'{{"install": [{{"download_info": {{"url": "file://{wheel}"}}}}]}}'
    stand_in = machine.path / "stand-in"
    stand_in.write_text(stand_in.read_text().replace("&& exit 1", f"&& {{ echo '{report}'; exit 0; }}", 1))
    done = machine.prepare(PYTHON=python)
    assert ": 7 MB, from a folder of this machine" in done.stderr
    assert (done.returncode, done.stdout) == (0, "prepared\n"), done.stderr


class Step:
    """One step of the set-up that runs until it is stopped; `function` runs its program."""

    def __init__(self, machine: Machine, function: str, options: str = "") -> None:
        self.pid_file, self.go, self.finished = (machine.path.parent / name for name in ("pid", "go", "finished"))
        script = f"echo $$ >{self.pid_file}.new; {shutil.which('mv')} {self.pid_file}.new {self.pid_file}\n"
        wait = f"while [[ ! -e {self.go} ]]; do sleep 0.1; done; touch {self.finished}"
        machine.program("apt-get", script + wait)
        lib = f". {machine.checkout}/bootstrap/lib.sh; LOG={machine.path.parent}/log; "
        self.bash = subprocess.Popen(
            ["/bin/bash", "-c", f"{lib} step {options} busy {function} apt-get update; echo went on"],
            env=machine.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # to be interrupted as from a terminal: the whole group
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # where tests run in the background
        )

    def __enter__(self) -> Step:
        try:
            _wait_for("the program", self.pid_file.exists)
        except BaseException:
            self.bash.kill()
            self.bash.communicate(timeout=30)
            raise
        self.pid = int(self.pid_file.read_text())
        return self

    def __exit__(self, *_: object) -> None:
        self.go.touch()
        self.bash.kill()
        self.bash.communicate(timeout=30)
        proc.send([self.pid], signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("function", ["as_root", ""])
def test_an_interrupted_step_leaves_nothing_running(as_root: Machine, function: str, number: signal.Signals) -> None:
    with Step(as_root, function) as step:
        os.killpg(step.bash.pid, number)
        said, _ = step.bash.communicate(timeout=30)
        assert (step.bash.returncode, "went on" in said) == (130, False)
        assert proc.started(step.pid) is None
        assert not step.finished.exists()


def test_a_step_that_must_not_be_torn_is_waited_for(as_root: Machine) -> None:
    with Step(as_root, "as_root", "--whole") as step:
        os.killpg(step.bash.pid, signal.SIGINT)
        time.sleep(0.5)  # long enough for a signal that is passed on; shorter, the test would pass too easily
        assert proc.started(step.pid) is not None
        step.go.touch()
        said, _ = step.bash.communicate(timeout=30)
        assert (step.bash.returncode, "went on" in said) == (130, False)
        assert "is not interrupted" in said
        assert step.finished.exists()


def test_what_dpkg_does_is_not_torn(as_root: Machine) -> None:
    as_root.environment(has_torch=True)
    as_root.program("apt-get", "exit 0")
    as_root.prepare(PYTHONPATH=no_slurm(as_root), CI="true")
    download, install = as_root.called("apt-get install -y")
    assert "--download-only" in download
    assert "--download-only" not in install


def _wait_for(what: str, condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.02)


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
