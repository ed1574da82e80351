"""Slurm run by root, the job by an ordinary user: nothing in a job may need an administrator.

Also: a doomed node does not get the job back. Without root's watcher the next attempt steps back at once while the
node still stands; with it the node is drained, and the job is not given to it at all.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pctool.cluster.view import load_view
from pctool.run.env import IMDS
from pctool.run.layout import RunDir
from pctool.run.ledger import Event, Ledger
from pctool.run.records import read_claim
from pctool.slurm.private import PrivateCluster

ROOT = Path(__file__).resolve().parents[2]
USER = "nobody"
SCALE = 0.2
LIMIT_S = 300.0  # a bound for the whole job, some 60 s long here; not a figure that is asserted

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.root]

LONG_RUN = ("--steps", "300", "--every", "50")


class Job:
    """A job of an ordinary user on a cluster of root's."""

    def __init__(self, cluster: PrivateCluster, home: Path) -> None:
        self.cluster = cluster
        self.home = home
        self.run = RunDir(home / "run")
        self.python, self.environ = interpreter_for(USER, home)

    def as_user(self, *argv: str) -> str:
        """Run a command as the user and return what it printed."""
        ids = pwd.getpwnam(USER)
        done = subprocess.run(
            ["setpriv", f"--reuid={ids.pw_uid}", f"--regid={ids.pw_gid}", "--clear-groups", "env", *argv],
            env={**self.environ, **self.cluster.env},
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self) -> str:
        """Submit the example as the user and return the job id."""
        example = ROOT / "docs/examples/tinygpt"
        shutil.copy(example / "train.py", self.home)
        flags = ("-N", "4", "-p", "p5spot", "--gpus-per-node", "8", "--ranks-per-node", "1", "--srun-wait", "12")
        printed = self.as_user(
            self.python, "-m", "pctool", "submit", "--parsable", "--run-dir", str(self.run.path), *flags,
            "--", str(self.home / "train.py"), *LONG_RUN,
        )  # fmt: skip
        return printed.strip()

    def events(self, name: str) -> list[Event]:
        """Return the ledger's events of that name."""
        return [event for event in Ledger(self.run.ledger).read() if event.event == name]

    def wait_event(self, name: str, *, least_attempt: int = 0) -> Event:
        """Wait for an event."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            found = [event for event in self.events(name) if (event.attempt or 0) >= least_attempt]
            if found:
                return found[0]
            time.sleep(0.1)
        raise AssertionError(
            f"no {name}; the ledger has {[(e.event, e.attempt) for e in Ledger(self.run.ledger).read()]}"
        )

    def nodes(self, attempt: int) -> tuple[str, ...]:
        """Return an attempt's nodes."""
        claim = read_claim(self.run.attempt(attempt))
        assert claim is not None
        return claim.nodes


def interpreter_for(user: str, home: Path) -> tuple[str, dict[str, str]]:
    """Return an interpreter with pctool and torch that `user` can run, and its environment.

    The one running the tests may lie in a folder that is closed to others; then the system's of the same version runs
    with the same packages. `env` stands in between, since setpriv still looks up its program with root's capabilities.
    """
    paths = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "XDG_STATE_HOME": str(home / "state")}
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python, extra in ((sys.executable, {}), (f"/usr/bin/{version}", {"PYTHONPATH": ":".join(paths)})):
        ids = pwd.getpwnam(user)
        argv = ["setpriv", f"--reuid={ids.pw_uid}", f"--regid={ids.pw_gid}", "--clear-groups", "env", python, "-c"]
        try:
            done = subprocess.run(
                [*argv, "import pctool.cli.main, torch, submitit"],
                env={**environ, **extra},
                cwd="/",
                capture_output=True,
            )
        except OSError:
            continue
        if done.returncode == 0:
            return python, {**environ, **extra}
    pytest.fail(
        f"{user} can run no interpreter with pctool and torch: put the checkout and {version} where others may read"
    )


@pytest.fixture
def home() -> Iterator[Path]:
    """Give a folder that belongs to the user."""
    folder = Path(tempfile.mkdtemp(prefix="pctool-user-"))
    ids = pwd.getpwnam(USER)
    os.chown(folder, ids.pw_uid, ids.pw_gid)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def root_watchers(cluster: PrivateCluster, folder: Path) -> Iterator[None]:
    """Run root's watcher for each node, as the bootstrap's systemd unit does on a real one."""
    folder.chmod(0o755)
    started = []
    for node, state in cluster.status()["nodes"].items():
        notice_file = folder / f"{node}.json"
        cluster.set_node_env(node, {"PCTOOL_NOTICE_FILE": str(notice_file)})
        argv = [sys.executable, "-m", "pctool", "watch", "--drain", "--node", node, "--notice-file", str(notice_file)]
        environ = {**os.environ, **cluster.env, IMDS: state["endpoint"]}
        started.append(subprocess.Popen(argv, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    try:
        yield
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            process.wait(30)


def test_without_roots_watcher_the_next_attempt_steps_back_from_the_doomed_node(home: Path) -> None:
    with PrivateCluster.start(load_view(ROOT / "cluster-configs/p5-spot.yaml"), nodes=4, time_scale=SCALE) as cluster:
        job = Job(cluster, home)
        job.submit()
        job.wait_event("first-step")
        doomed = job.nodes(0)[-1]
        cluster.notice(doomed, lead_s=300)
        step_back = job.wait_event("step-back")
        assert step_back.attempt == 1
        assert step_back.fields["node"] == doomed
        assert not [e for e in job.events("first-step") if e.attempt == 1]
        resumed = job.wait_event("resumed", least_attempt=2)
        assert resumed.fields["step"] == job.events("stop-step")[0].fields["step"]
        final = job.wait_event("decided", least_attempt=resumed.attempt or 0)
        assert final.fields["cause"] == "done"
        owner = job.run.ledger.stat().st_uid
        assert owner == pwd.getpwnam(USER).pw_uid


def test_with_roots_watcher_the_doomed_node_is_drained_and_not_given_again(home: Path, tmp_path: Path) -> None:
    view = load_view(ROOT / "cluster-configs/p5-spot.yaml")
    with PrivateCluster.start(view, nodes=4, time_scale=SCALE) as cluster, root_watchers(cluster, tmp_path):
        job = Job(cluster, home)
        job.submit()
        job.wait_event("first-step")
        doomed = job.nodes(0)[-1]
        instance = cluster.status()["nodes"][doomed]["instance_id"]
        cluster.notice(doomed, lead_s=300)
        resumed = job.wait_event("resumed", least_attempt=1)
        assert not job.events("step-back")
        attempt = resumed.attempt or 0
        if doomed in job.nodes(attempt):  # the name came back: then it is another instance
            assert cluster.status()["nodes"][doomed]["instance_id"] != instance
        final = job.wait_event("decided", least_attempt=attempt)
        assert final.fields["cause"] == "done"
