"""A private Slurm on this machine: real daemons, simulated nodes that boot, get notices, and die.

with PrivateCluster.start(load_view("cluster.yaml"), nodes=4) as cluster:
    os.environ.update(cluster.env)
    ...                                   # sbatch, srun, squeue work as on the cluster
    cluster.notice("p5spot-dy-p5-2")      # two minutes (times the time scale) later the node is gone
"""

from __future__ import annotations

from pctool.slurm.private.client import PrivateCluster

__all__ = ["PrivateCluster"]
