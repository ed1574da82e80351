"""PrivateCluster: start a private cluster, steer it, end it."""

from __future__ import annotations

import json
import os
import pickle
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pctool.errors import NotFoundError, SlurmError, UsageError
from pctool.slurm.install import SlurmInstall, find_install
from pctool.slurm.private.conf import limit_nodes
from pctool.slurm.private.config import ClusterConfig
from pctool.slurm.private.tools import LONGEST_FOLDER
from pctool.spec.cluster import ClusterView

_START_S = 120.0  # the supervisor's own limits are shorter and say more
_ANSWER_S = 60.0  # a request may wait for one Slurm command of the supervisor
_DOWN_S = 60.0
_LONGEST_FOLDER = 60  # bytes: slurmstepd's socket below it must fit into the 108 bytes of a Unix socket's path
_PREFIX = "pct-"
_NAME_BYTES = len("/pct-") + 8  # mkdtemp adds eight letters

Down = float | Literal["clustermgtd"] | None
Fault = Literal["500", "hang", "refuse-token"]


class PrivateCluster:
    """One running private cluster. Times are seconds on the real cluster; the time scale is applied to them."""

    def __init__(self, facts: Mapping[str, Any], keeper: subprocess.Popen[bytes] | None) -> None:
        self.folder = Path(facts["folder"])
        self.node_names: tuple[str, ...] = tuple(facts["nodes"])
        self.slurm_version: str = facts["slurm_version"]
        self.time_scale: float = facts["time_scale"]
        self.not_mirrored: dict[str, str] = facts["not_mirrored"]
        self._facts = facts
        self._keeper = keeper

    @classmethod
    def start(
        cls,
        view: ClusterView,
        *,
        nodes: int | None = None,
        time_scale: float = 1.0,
        boot_delay: float = 0.0,
        booted: bool = True,
        install: SlurmInstall | None = None,
        folder: Path | None = None,
        settings: Mapping[str, str] | None = None,
        owner: Literal["process"] | None = "process",
    ) -> PrivateCluster:
        """Start a cluster that mirrors `view` and return when it is usable.

        `nodes` limits the nodes a queue has. `boot_delay` is how long an instance takes to boot. With `booted` all
        nodes are up; without, dynamic ones boot when a job asks for them. `settings` are slurm.conf settings that
        win over all others and are not scaled. With owner="process" the cluster ends with the calling process, however
        that ends; with None it lives until `down`.

        Raises SlurmError if there is no usable Slurm or a daemon does not start, UsageError for a folder in use.
        """
        if time_scale <= 0 or (nodes is not None and nodes < 1):
            raise UsageError("a private cluster needs a positive time scale and at least one node")
        usable = install or find_install()
        config = ClusterConfig(
            view=limit_nodes(view, nodes),
            folder=_make_folder(folder, LONGEST_FOLDER if usable.root else _LONGEST_FOLDER),
            install=usable,
            time_scale=time_scale,
            boot_delay=boot_delay,
            booted=booted,
            settings=dict(settings or {}),
            owner=os.getpid() if owner == "process" else None,
        )
        return cls(*_start_keeper(config))

    @classmethod
    def attach(cls, folder: Path) -> PrivateCluster:
        """Return a running cluster by its folder; raise NotFoundError if none runs there."""
        return cls(_request(folder / "control", {"op": "status"}), None)

    @property
    def env(self) -> dict[str, str]:
        """Return what to put into the environment so that Slurm's commands speak to this cluster."""
        path, prefix = os.environ.get("PATH", os.defpath), self._facts["path_prefix"]
        if prefix and prefix not in path.split(":"):
            path = f"{prefix}:{path}"
        return {"SLURM_CONF": self._facts["conf"], "PATH": path}

    def notice(
        self,
        node: str,
        *,
        lead_s: float = 120.0,
        action: str = "terminate",
        die: bool = True,
        down_after: Down = "clustermgtd",
        replace_after: float | None = None,
    ) -> float:
        """Give a node a spot interruption notice; return the deadline (epoch seconds), at which it dies if `die`."""
        how = {"lead_s": lead_s, "action": action, "die": die, "down_after": down_after, "replace_after": replace_after}
        return float(self._ask("notice", node=node, **how))

    def rebalance(self, node: str) -> None:
        """Give a node a rebalance recommendation."""
        self._ask("rebalance", node=node)

    def clear(self, node: str) -> None:
        """Take back a node's notice and recommendation; it lives on."""
        self._ask("clear", node=node)

    def imds_fault(self, node: str, mode: Fault | None) -> None:
        """Make a node's metadata service answer 500, hang, or refuse tokens; None heals it."""
        self._ask("imds_fault", node=node, mode=mode)

    def kill(self, node: str, *, down_after: Down = "clustermgtd", replace_after: float | None = None) -> None:
        """Lose a node now: when this returns, no process of it is left.

        It is set DOWN by clustermgtd's next round, `down_after` seconds later, or (None) by nobody but Slurm itself
        after SlurmdTimeout. Its name comes back as a new instance once clustermgtd has powered it down and a job wants
        it; with `replace_after`, so many seconds after the loss.
        """
        self._ask("kill", node=node, down_after=down_after, replace_after=replace_after)

    def set_node_env(self, node: str, env: Mapping[str, str]) -> None:
        """Add to the environment of every task that starts on the node from now on."""
        self._ask("env", node=node, env=dict(env))

    def boot(self, *, delay: float | None = None, fail: int | None = None) -> None:
        """Change how instances boot: after `delay` seconds; the next `fail` times there is no capacity (-1: never)."""
        self._ask("boot", delay=delay, fail=fail)

    def processes(self, node: str | None = None, job: str | int | None = None) -> list[int]:
        """Return the pids of a node (None: all nodes), slurmd and all; of one job only where `job` is given."""
        found = self._ask("processes", node=node, job=None if job is None else str(job))
        return [int(pid) for pid in found]

    def status(self) -> dict[str, Any]:
        """Return the cluster's facts and, by node, its state, instance, deadline and Slurm's own state."""
        found = self._ask("status")
        assert isinstance(found, dict)
        return found

    def down(self) -> None:
        """End the cluster; when this returns nothing of it is left. Harmless on one that has ended.

        Raises SlurmError if it gives no answer and was not started by this process as its owner, or does not end.
        """
        pipe = self._keeper.stdin if self._keeper else None
        try:
            self._ask("down")
        except NotFoundError:
            pass
        except SlurmError:
            if pipe is None:
                raise  # with one the keeper ends the cluster all the same: it needs no answer
        finally:
            if pipe is not None:
                pipe.close()
        if self._keeper is not None:
            self._keeper.wait(_DOWN_S)
        _wait_until_gone(self.folder)

    def __enter__(self) -> PrivateCluster:
        """Return the cluster itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the cluster."""
        self.down()

    def _ask(self, operation: str, **words: Any) -> Any:
        return _request(self.folder / "control", {"op": operation, **words})


def _make_folder(folder: Path | None, longest: int) -> Path:
    if folder is None:
        base = tempfile.gettempdir()
        made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base if len(base) <= longest - _NAME_BYTES else "/tmp"))
    else:
        made = folder.absolute()
        if len(str(made)) > longest:
            raise UsageError(
                f"the path of a private cluster's folder may have {longest} bytes here, this one has {len(str(made))}",
                where=str(made),
                fix="name a shorter one, or none: then one below /tmp is made",
            )
        try:
            made.mkdir(parents=True)
        except FileExistsError:
            raise UsageError("the folder is there already", where=str(made), fix="name a new one") from None
    made.chmod(0o755)  # jobs of other users look up their TaskProlog in it
    return made


def _start_keeper(config: ClusterConfig) -> tuple[dict[str, Any], subprocess.Popen[bytes]]:
    """Start the keeper and wait for its report."""
    keeper = subprocess.Popen(
        [sys.executable, "-m", "pctool.slurm.private.keeper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    try:
        pickle.dump(config, keeper.stdin)
        keeper.stdin.flush()
        facts = _read_report(keeper)
    except BaseException:  # Ctrl-C included: the half-started cluster must go
        keeper.stdin.close()
        keeper.terminate()
        keeper.wait(_DOWN_S)
        shutil.rmtree(config.folder, ignore_errors=True)
        raise
    finally:
        keeper.stdout.close()
        keeper.stderr.close()
    if config.owner is None:
        keeper.stdin.close()
        keeper.stdin = None
        keeper.returncode = 0  # it outlives us on purpose
    return facts, keeper


def _read_report(keeper: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    ready, _, _ = select.select([keeper.stdout], [], [], _START_S)
    line = keeper.stdout.readline() if ready else b""
    if not line:
        said = keeper.stderr.read().decode(errors="replace").strip() if ready else f"nothing in {_START_S:g} s"
        raise SlurmError(f"the private cluster did not start; its keeper said: {said or 'nothing'}")
    report: dict[str, Any] = json.loads(line)
    if "error" in report:
        raise SlurmError(report["error"], where=report.get("where"), fix=report.get("fix"))
    return report


def _request(path: Path, request: Mapping[str, Any]) -> Any:
    """Send one request and return its result; raise NotFoundError if no cluster answers there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(str(path))
            connection.sendall(json.dumps(request).encode() + b"\n")
            line = connection.makefile("rb").readline()
        except (FileNotFoundError, ConnectionError):
            raise NotFoundError("no private cluster runs there", where=str(path.parent)) from None
        except TimeoutError:
            raise SlurmError(f"the private cluster gave no answer in {_ANSWER_S:g} s", where=str(path.parent)) from None
    if not line:
        if request["op"] == "down":
            return None
        raise NotFoundError("the private cluster has ended", where=str(path.parent))
    answer = json.loads(line)
    if not answer["ok"]:
        kinds = {2: UsageError, 4: NotFoundError}
        raise kinds.get(answer.get("code"), SlurmError)(answer["error"], fix=answer.get("fix"))
    return answer["result"]


def _wait_until_gone(folder: Path) -> None:
    """Wait until the keeper has removed the folder, the last thing it does."""
    end = time.monotonic() + _DOWN_S
    while folder.exists():
        if time.monotonic() > end:
            raise SlurmError(f"the private cluster did not end in {_DOWN_S:g} s", where=str(folder))
        time.sleep(0.02)  # the keeper tells nobody; the folder goes within some tens of milliseconds
