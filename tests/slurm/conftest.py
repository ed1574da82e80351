"""A running private cluster for tests that only need one, and a way to start others. Never skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from private_harness import CONFIG, SCALE, Shell, StartCluster

from pctool.cluster.view import load_view
from pctool.errors import SlurmError
from pctool.slurm.install import find_install
from pctool.slurm.private import PrivateCluster


@pytest.fixture(scope="session")
def start_cluster() -> StartCluster:
    """Return PrivateCluster.start for the shipped config; a missing Slurm fails the test and says what to install."""
    try:
        install = find_install()
    except SlurmError as error:
        pytest.fail(str(error))

    def start(**options: Any) -> PrivateCluster:
        return PrivateCluster.start(load_view(CONFIG), **{"install": install, "time_scale": SCALE, **options})

    return start


@pytest.fixture(scope="session")
def private_cluster(start_cluster: StartCluster) -> Iterator[PrivateCluster]:
    """Give a running cluster of four nodes that never power down. Don't kill its nodes: others use it too."""
    with start_cluster(settings={"SuspendTime": "-1"}) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def shell_for() -> Callable[[PrivateCluster], Shell]:
    """Return a way to run Slurm's commands against a cluster."""
    return Shell
