"""The parts of a private cluster that need no Slurm: process trees, leftovers, timers, ports, programs, roots."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pctool.errors import NotFoundError, SlurmError, UsageError
from pctool.slurm.install import find_install, parse_release, resolve
from pctool.slurm.private import elf, machine, proc, registry, subreaper
from pctool.slurm.private.daemons import is_down
from pctool.slurm.private.ports import Ports
from pctool.slurm.private.timers import Timers
from pctool.slurm.unpack import parse_simulation

ONLY_X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the program is x86-64 machine code")

INST = """\
NOTE: This is only a simulation!
Inst libmunge2 (0.5.15-2+deb12u1 Debian:12/stable [amd64])
Inst libc6 (2.36-9 Debian:12/stable [amd64]) []
Inst libnuma1:amd64 [2.0.15] (2.0.16-1 Debian:12/stable [amd64])
Inst slurmd (22.05.8-4+deb12u3 Debian:12/stable [amd64])
Conf slurmd (22.05.8-4+deb12u3 Debian:12/stable [amd64])
"""


def _process(pid: int, parent: int, name: str = "x", state: str = "S") -> tuple[int, proc.Process]:
    return pid, proc.Process(pid, parent, name, state)


def test_descendants_come_parents_first_and_without_zombies() -> None:
    tree = dict([_process(2, 1), _process(3, 2), _process(4, 3), _process(5, 2, state="Z"), _process(6, 9)])
    assert proc.descendants(1, tree) == [2, 3, 4]
    assert proc.descendants(7, tree) == []


@pytest.mark.parametrize(
    ("title", "step"),
    [
        ("slurmstepd: [12.0]", ("12", "0")),
        ("slurmstepd: [12.batch]", ("12", "batch")),
        ("slurmstepd: [12+1.3]", ("12", "3")),
        ("slurmstepd", None),
        ("/usr/bin/python", None),
    ],
)
def test_the_step_in_a_title(title: str, step: tuple[str, str] | None) -> None:
    assert machine.step_of_title(title) == step


def test_the_step_in_an_environment() -> None:
    assert machine.step_of_environment({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}) == ("7", "2")
    assert machine.step_of_environment({"SLURM_JOB_ID": "7"}) == ("7", "batch")
    assert machine.step_of_environment({}) is None


def test_leftovers_are_what_no_living_step_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {10: "slurmd", 11: "x", 20: "slurmstepd", 21: "x", 30: "x", 31: "x", 32: "x", 33: "slurm_script"}
    parents = {10: 1, 11: 10, 20: 1, 21: 20, 30: 1, 31: 1, 32: 1, 33: 1}
    tree = dict(_process(pid, parents[pid], name) for pid, name in names.items())
    envs = {30: {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"}, 31: {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "1"}, 32: {}}
    envs[33] = {"SLURM_JOB_ID": "4"}
    monkeypatch.setattr(proc, "environment", lambda pid: envs.get(pid, {}))
    monkeypatch.setattr(proc, "arguments", lambda pid: ["slurmstepd: [5.0]"] if pid == 20 else ["x"])
    assert machine.leftovers(1, 10, tree) == {31, 33}  # 30's step lives; 32 hides, and may belong to it
    del tree[20], tree[21]
    assert machine.leftovers(1, 10, tree) == {30, 31, 32, 33}


TREE = """
import os, subprocess, sys, time
from pctool.slurm.private import proc
proc.become_subreaper()
subprocess.Popen(["sh", "-c", "setsid sleep 700 & setsid sh -c 'trap : TERM HUP CONT; while :; do sleep 0.05; done' &"])
while len(proc.descendants(os.getpid(), proc.snapshot())) < 3:
    time.sleep(0.01)
print("ready", flush=True)
sys.stdin.read()
def reap():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
proc.kill_below(os.getpid(), reap=reap)
print(len(proc.descendants(os.getpid(), proc.snapshot())), flush=True)
"""


def test_killing_a_tree_takes_orphans_and_forkers_along() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TREE], input="", stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["ready", "0"]


def test_a_death_of_the_parent_reaches_the_child() -> None:
    code = (
        "import os, signal, time; from pctool.slurm.private import proc\n"
        "parent = os.getpid(); child = os.fork()\n"
        "if child == 0:\n    proc.die_with_parent(signal.SIGKILL, parent); time.sleep(60)\n"
        "time.sleep(0.2); print(child, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    end = time.monotonic() + 10
    while (found := proc.read(int(done.stdout))) and found.state not in "ZX":
        assert time.monotonic() < end
        time.sleep(0.01)


def test_timers_run_in_order_and_only_when_due() -> None:
    now = [100.0]
    timers, ran = Timers(clock=lambda: now[0]), []
    assert timers.next_in() is None
    timers.after(5, lambda: ran.append("b"))
    timers.after(2, lambda: ran.append("a"))
    timers.after(9, lambda: ran.append("c"))
    assert timers.next_in() == 2
    now[0] = 106
    for action in timers.due():
        action()
    assert ran == ["a", "b"]
    now[0] = 200
    assert timers.next_in() == 0


def test_ports_are_reserved_until_they_are_given_back() -> None:
    first, second = Ports(), Ports()
    mine, others = first.take(20), second.take(20)
    assert mine == sorted(mine)
    assert not set(mine) & set(others)
    assert not second._reserve(mine[0])
    first.close()
    assert second._reserve(mine[0])
    second.close()
    with pytest.raises(SlurmError, match="no 100000 free TCP ports"):
        Ports().take(100000)


@ONLY_X86
def test_the_subreaper_program_keeps_argv_and_adopts_orphans(tmp_path: Path) -> None:
    program = tmp_path / "p"
    program.write_bytes(subreaper.program(sys.executable))
    program.chmod(0o755)
    code = (
        "import os, subprocess, sys, time\n"
        "print(sys.argv[1:], os.environ['X'])\n"
        "orphan = subprocess.check_output(['sh', '-c', 'setsid sleep 60 >/dev/null & echo $!'])\n"
        "time.sleep(0.1); print(open(f'/proc/{int(orphan)}/stat').read().split()[3] == str(os.getpid()))\n"
        "os.kill(int(orphan), 9)"
    )
    done = subprocess.run(
        [str(program), "-c", code, "a b", ""], env={"X": "y"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["['a b', ''] y", "True"]


@ONLY_X86
def test_a_subreaper_of_nothing_ends_with_127(tmp_path: Path) -> None:
    program = tmp_path / "p"
    program.write_bytes(subreaper.program("/none"))
    program.chmod(0o755)
    assert subprocess.run([str(program)], check=False).returncode == 127


def test_only_elf_programs_with_a_library_path_are_relocated() -> None:
    with pytest.raises(SlurmError, match="not a 64-bit"):
        elf.relocated(b"#!/bin/sh\n", loader="/l/ld", libraries="/l")
    with pytest.raises(SlurmError, match="no library path"):
        elf.relocated(
            subreaper.program("/x") if platform.machine() == "x86_64" else b"\x7fELF\x02\x01".ljust(64, b"\0"),
            loader="/l/ld",
            libraries="/l",
        )


@pytest.mark.parametrize(
    ("text", "version", "release"),
    [
        ("slurm-wlm 22.05.8", (22, 5), "22.05.8"),
        ("slurm 24.11.5\n", (24, 11), "24.11.5"),
        ("slurm-wlm 26.05.5", (26, 5), "26.05.5"),
    ],
)
def test_releases(text: str, version: tuple[int, int], release: str) -> None:
    assert parse_release(text) == (version, release)


@pytest.mark.parametrize("text", ["slurm 21.08.8", "slurm 20.11.9-2"])
def test_old_releases_are_refused(text: str) -> None:
    with pytest.raises(SlurmError, match="too old"):
        parse_release(text)


def test_links_are_followed_inside_a_root(tmp_path: Path) -> None:
    (tmp_path / "usr/sbin").mkdir(parents=True)
    (tmp_path / "etc/alternatives").mkdir(parents=True)
    (tmp_path / "usr/sbin/slurmd-wlm").write_text("x")
    (tmp_path / "usr/sbin/slurmd").symlink_to("/etc/alternatives/slurmd")
    (tmp_path / "etc/alternatives/slurmd").symlink_to("/usr/sbin/slurmd-wlm")
    (tmp_path / "sbin").symlink_to("usr/sbin")
    (tmp_path / "loop").symlink_to("loop")
    assert resolve(tmp_path, "sbin/slurmd") == tmp_path / "usr/sbin/slurmd-wlm"
    assert resolve(tmp_path, "usr/sbin/none") is None
    assert resolve(tmp_path, "loop") is None


def test_no_slurm_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PCTOOL_SLURM_ROOT", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("pctool.slurm.install.shutil.which", lambda *_, **__: None)
    with pytest.raises(SlurmError, match="apt-get install slurmctld slurmd slurm-client munge"):
        find_install()
    monkeypatch.setenv("PCTOOL_SLURM_ROOT", str(tmp_path))
    with pytest.raises(SlurmError, match="no usable Slurm in it: no munged, slurmctld"):
        find_install()


def test_what_apt_would_install() -> None:
    assert parse_simulation(INST, {"libc6", "libmunge2"}) == [
        ("libmunge2", "0.5.15-2+deb12u1"),
        ("libnuma1", "2.0.16-1"),
        ("slurmd", "22.05.8-4+deb12u3"),
    ]
    with pytest.raises(SlurmError, match="names no Slurm packages"):
        parse_simulation("Inst libc6 (2.36-9 Debian)\n", set())


@pytest.mark.parametrize(
    ("state", "down"),
    [
        ("DOWN+CLOUD", True),
        ("DOWN*+CLOUD+NOT_RESPONDING", True),
        ("IDLE+CLOUD+DRAIN", True),
        ("IDLE+CLOUD+COMPLETING+DRAIN", False),
        ("ALLOCATED+CLOUD+DRAIN", False),
        ("DOWN+CLOUD+POWERING_DOWN", False),
        ("IDLE+CLOUD+POWERED_DOWN", False),
        ("IDLE+CLOUD", False),
        ("", False),
    ],
)
def test_what_clustermgtd_replaces(state: str, down: bool) -> None:
    assert is_down(state) is down


def test_names_of_private_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(NotFoundError, match="no private cluster 'x'"):
        registry.find("x")
    with pytest.raises(UsageError, match="cannot be the name"):
        registry.find("../x")
    with registry.claim("x"), pytest.raises(UsageError, match="is starting a private cluster"), registry.claim("x"):
        pass
    (registry.state_folder() / "x.json").write_text('{"folder": "/none"}')
    assert registry.names() == []  # it has ended: its entry goes
    with pytest.raises(KeyboardInterrupt), registry.claim("x"):
        raise KeyboardInterrupt
    assert not list(registry.state_folder().glob("*"))


def test_signals_to_the_gone_are_no_error() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    proc.send([gone.pid], signal.SIGTERM)
    assert proc.read(gone.pid) is None
    assert proc.environment(gone.pid) == {}
    assert proc.arguments(gone.pid) == [""]
    assert proc.environment(os.getpid())
