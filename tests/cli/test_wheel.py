"""pctool installed from its wheel, in a clean environment away from any checkout, does all it does in one.

The environment's heavy requirements (torch, boto3 ...) are those of the environment that runs the tests, by a path in
a .pth file; pctool itself comes from the wheel.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("sbatch-templates", "cluster-configs", "bootstrap", "docs/examples")
SOURCES = ("pctool", "bootstrap", "sbatch-templates", "cluster-configs", "docs")
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE")
EXAMPLE = "docs/examples/tinygpt/job.toml"
CLUSTER = "cluster-configs/p5-spot.yaml"


def run(argv: list[str | Path], cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a program with nothing that leads it to the checkout; no network is needed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PCTOOL", "VIRTUAL"))}
    return subprocess.run(
        [str(word) for word in argv], cwd=cwd, env=kept, capture_output=True, text=True, timeout=timeout
    )


def ok(argv: list[str | Path], cwd: Path, timeout: float = 300) -> str:
    done = run(argv, cwd, timeout)
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def carried() -> set[str]:
    """Return the files that the wheel must carry, by their paths in the checkout."""
    litter = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
    names = set()
    for folder in FOLDERS:
        for path, folders, files in os.walk(ROOT / folder):
            skipped = litter(path, folders + files)
            folders[:] = [name for name in folders if name not in skipped]
            names |= {str(Path(path, name).relative_to(ROOT)) for name in files if name not in skipped}
    return names


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the package is built from: building in the checkout would leave a build folder there."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    return copy


def build(source: Path, into: Path) -> Path:
    argv: list[str | Path] = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    ok([*argv, "-w", into, source], cwd=into)
    (wheel,) = into.glob("pctool-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment that has the wheel."""
    venv = tmp_path_factory.mktemp("clean") / "venv"
    ok([sys.executable, "-m", "venv", venv], cwd=venv.parent)
    python = venv / "bin" / "python"
    ok([python, "-m", "pip", "install", "--no-deps", "--no-index", wheel], cwd=venv.parent)
    inside = ok([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], cwd=venv).strip()
    # a plain path: .pth files that lie there, such as an editable pctool's, are not read
    Path(inside, "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture
def pctool(python: Path) -> Path:
    return python.with_name("pctool")


def resource(python: Path, name: str, cwd: Path) -> Path:
    program = f"from pctool.facts.resources import resource; print(resource({name!r}))"
    return Path(ok([python, "-c", program], cwd=cwd).strip())


def test_the_wheel_carries_every_file_of_the_folders_and_no_litter(wheel: Path) -> None:
    prefix = "pctool/_data/"
    with zipfile.ZipFile(wheel) as archive:
        names = {name.removeprefix(prefix) for name in archive.namelist() if name.startswith(prefix)}
        assert names == carried()
        for name in names:
            assert archive.read(prefix + name) == (ROOT / name).read_bytes()


def test_scripts_in_the_wheel_stay_executable(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        mode = archive.getinfo("pctool/_data/bootstrap/try.sh").external_attr >> 16
    assert mode & 0o111 == 0o111


def test_a_wheel_built_from_the_sdist_is_the_same(source: Path, wheel: Path, tmp_path: Path) -> None:
    ok([sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", tmp_path, source], cwd=tmp_path)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # Debian 12's Python 3.11.2 has none yet, and newer ones warn without
            archive.extractall(tmp_path / "unpacked", filter="data")
        else:
            archive.extractall(tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    (tmp_path / "again").mkdir()
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(build(unpacked, tmp_path / "again")) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())


def test_pctool_comes_from_the_wheel(python: Path, tmp_path: Path) -> None:
    where = Path(ok([python, "-c", "import pctool; print(pctool.__file__)"], cwd=tmp_path).strip())
    assert where.is_relative_to(python.parents[1])
    assert resource(python, EXAMPLE, tmp_path).is_relative_to(python.parents[1])


def test_renders_the_packaged_example(python: Path, pctool: Path, tmp_path: Path) -> None:
    script = ok([pctool, "render", resource(python, EXAMPLE, tmp_path)], cwd=tmp_path)
    assert script.startswith("#!/bin/bash")
    assert "#SBATCH --nodes=4" in script
    assert str(python) in script  # the interpreter pctool runs under, never one looked up on PATH
    assert str(ROOT) not in script.replace(str(Path(sys.executable).parent), "")


def test_plans_the_submission_of_the_packaged_example(python: Path, pctool: Path, tmp_path: Path) -> None:
    job, cluster = (resource(python, name, tmp_path) for name in (EXAMPLE, CLUSTER))
    plan = json.loads(
        ok(
            [pctool, "submit", "--dry-run", "--json", "--cluster", cluster, "--run-dir", tmp_path / "run", job],
            tmp_path,
        )
    )
    assert "#SBATCH --nodes=4" in plan["script"]
    assert not (tmp_path / "run").exists()


@pytest.mark.slurm
@pytest.mark.torch
@pytest.mark.timeout(900)
def test_rehearses_the_packaged_example(python: Path, pctool: Path, tmp_path: Path) -> None:
    job, cluster = (resource(python, name, tmp_path) for name in (EXAMPLE, CLUSTER))
    argv: list[str | Path] = [pctool, "rehearse", job, "--cluster", cluster, "--nodes", "2", "--scenario", "notice"]
    (verdict,) = json.loads(ok([*argv, "--json"], cwd=tmp_path, timeout=800))["verdicts"]
    assert verdict["passed"], verdict
    assert verdict["steps_lost"] == 0
