"""The nodes of one private cluster as EC2 and clustermgtd would have them: instances that boot, get notices and die."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pctool.errors import NotFoundError, SlurmError
from pctool.slurm.private import conf, machine, proc
from pctool.slurm.private.config import ClusterConfig
from pctool.slurm.private.daemons import Daemons, is_down, is_given_up, processes_of
from pctool.slurm.private.imds_process import ImdsProcess
from pctool.slurm.private.settings import CLUSTERMGTD_PERIOD_S
from pctool.slurm.private.timers import Timers

ZONE = "us-east-2a"  # what the fake metadata service says
NO_CAPACITY = "(Code:InsufficientInstanceCapacity)Failure when resuming nodes"  # slurm_resume's own words
# slurmctld compares a slurmd's boot time with its own request in whole seconds, and ignores one that looks older
BOOT_FLOOR_S = 2.0
GONE = "Node's backing instance has gone"
ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"

Down = float | Literal["clustermgtd"] | None


@dataclass
class Node:
    """One node; `life` counts its instances, so that a timer of an earlier one does nothing."""

    name: str
    static: bool
    instance_type: str
    state: Literal["off", "booting", "up", "dead"] = "off"
    life: int = 0
    init: int | None = None  # pid of the node's init
    instance_id: str | None = None
    endpoint: str | None = None
    deadline: float | None = None
    down: Down = "clustermgtd"  # who sets it DOWN once it is dead
    no_capacity: bool = False
    env: dict[str, str] = field(default_factory=dict)


class Fleet:
    """All nodes. Times that come in are unscaled seconds."""

    def __init__(self, config: ClusterConfig, daemons: Daemons, timers: Timers) -> None:
        self.config = config
        self.daemons = daemons
        self.timers = timers
        self.nodes = _nodes(config)
        self.boot_delay = config.boot_delay
        self.failing_boots = 0  # the next so many resume calls find no capacity

    def start(self) -> None:
        """Start the metadata services and clustermgtd's loop."""
        self.imds = ImdsProcess()
        self.timers.after(self._scaled(CLUSTERMGTD_PERIOD_S), self._clustermgtd)

    def boot_all(self) -> None:
        """Boot every node now."""
        for node in self.nodes.values():
            self._boot(node)

    def node(self, name: str) -> Node:
        """Return a node; raise NotFoundError for a name that is not there."""
        found = self.nodes.get(name)
        if found is None:
            raise NotFoundError(f"the private cluster has no node {name!r}", fix=f"it has: {' '.join(self.nodes)}")
        return found

    # what EC2 does

    def notice(self, name: str, *, lead_s: float, action: str, die: bool, down: Down, replace: float | None) -> float:
        """Give a running node an interruption notice; return the deadline (epoch seconds), when it dies."""
        node = self._running(name)
        node.deadline = time.time() + lead_s * self.config.time_scale
        self.imds.call("notice", name, action=action, when=node.deadline)
        if die:
            death = partial(self._die_of_notice, node, node.life, down, replace)
            self.timers.after(lead_s * self.config.time_scale, death)
        return node.deadline

    def _die_of_notice(self, node: Node, life: int, down: Down, replace: float | None) -> None:
        if node.life == life and node.state == "up" and node.deadline is not None:  # not cleared, not dead already
            self.kill(node.name, down=down, replace=replace)

    def clear(self, name: str) -> None:
        """Take back notice and rebalance recommendation; the node does not die."""
        node = self._running(name)
        node.deadline = None
        self.imds.call("clear", name)

    def rebalance(self, name: str) -> None:
        """Recommend a rebalance."""
        self._running(name)
        self.imds.call("rebalance", name)

    def imds_fault(self, name: str, mode: str | None) -> None:
        """Make the node's metadata service fail, or heal it."""
        self._running(name)
        self.imds.call("fault", name, mode=mode)

    def kill(self, name: str, *, down: Down, replace: float | None = None) -> None:
        """Lose a node at once: every process of it and its metadata service are gone."""
        node = self._running(name)
        self._end(node)
        node.state, node.down = "dead", down
        if isinstance(down, int | float):
            self.timers.after(self._scaled(down), partial(self._set_down, node, node.life))
        if replace is not None:
            self.timers.after(self._scaled(replace), partial(self._replace, node, node.life))

    def _end(self, node: Node) -> None:
        """Kill all processes of a node, its init last, and take its metadata service away."""
        init, node.init = node.init, None
        node.deadline = node.endpoint = None
        if init is not None:
            proc.kill_below(init)
            os.kill(init, signal.SIGKILL)
            os.waitpid(init, 0)
            self.imds.call("remove", node.name)

    def _running(self, name: str) -> Node:
        node = self.node(name)
        if node.state != "up":
            raise SlurmError(f"node {name} is {node.state}, not up", fix="see `status` for the nodes that are up")
        return node

    # what slurmctld asks for

    def power(self, verb: str, names: list[str]) -> None:
        """Do what Slurm's power saving asks: resume or suspend nodes."""
        nodes = [self.nodes[name] for name in names if name in self.nodes]
        if verb == "suspend":
            for node in nodes:
                self._end(node)
                node.state = "off"
            return
        if self.failing_boots:
            self.failing_boots -= 1
            self._no_capacity(nodes)
            return
        for node in nodes:
            if node.state != "up":
                node.state = "booting"
                node.life += 1
                delay = max(self._scaled(self.boot_delay), BOOT_FLOOR_S)
                self.timers.after(delay, partial(self._boot_due, node, node.life))

    def _no_capacity(self, nodes: list[Node]) -> None:
        """Set all nodes of one resume call DOWN, as slurm_resume does with all-or-nothing; clustermgtd resets them."""
        for node in nodes:
            node.no_capacity = True
        self.daemons.update_node(",".join(node.name for node in nodes), "DOWN", NO_CAPACITY)

    def _boot_due(self, node: Node, life: int) -> None:
        if node.life == life and node.state == "booting":
            self._boot(node)

    def _boot(self, node: Node, *, powered_up: bool = True) -> None:
        """Start a new instance under the node's name; `powered_up` says that Slurm expects it."""
        node.life += 1
        node.instance_id = f"i-{secrets.token_hex(8)}0"
        node.endpoint = self.imds.call(
            "add",
            node.name,
            instance_id=node.instance_id,
            instance_type=node.instance_type,
            availability_zone=ZONE,
        )
        node.state, node.down, node.no_capacity, node.deadline = "up", "clustermgtd", False, None
        self.write_env(node)
        slurmd = self.daemons.slurmd(node.name, powered_up=powered_up)
        node.init = machine.start(node.name, slurmd, self.daemons.env, self.daemons.printed(node.name))

    # what clustermgtd does

    def _clustermgtd(self) -> None:
        """Do one round: set nodes without an instance DOWN, and give every DOWN or drained node a new instance."""
        self.timers.after(self._scaled(CLUSTERMGTD_PERIOD_S), self._clustermgtd)
        for node in self.nodes.values():
            if node.state == "dead" and node.down == "clustermgtd":
                self._set_down(node, node.life)
        states = self.daemons.states()
        for node in self.nodes.values():
            state = states.get(node.name, "")
            if is_down(state) or (node.no_capacity and state.startswith("DOWN")):
                self._recycle(node)
            elif is_given_up(state):
                self._end(node)
                node.state = "off"
                self.daemons.update_node(node.name, "RESUME")

    def _set_down(self, node: Node, life: int) -> None:
        if node.life == life and node.state == "dead":
            self.daemons.update_node(node.name, "DOWN", GONE)

    def _recycle(self, node: Node) -> None:
        """Terminate the instance and power the node down; a static node gets its next instance at once."""
        self._end(node)
        node.state, node.no_capacity = "off", False
        self.daemons.update_node(node.name, "POWER_DOWN_FORCE", "clustermgtd replaces the instance")
        if node.static:
            self.daemons.update_node(node.name, "POWER_UP")

    def _replace(self, node: Node, life: int) -> None:
        """Bring a dead node back as a new instance without power saving's waits."""
        if node.life != life or node.state != "dead":
            return
        self._boot(node, powered_up=False)
        if self.daemons.states().get(node.name, "").startswith("DOWN"):
            self.daemons.update_node(node.name, "RESUME")

    # the rest

    def set_env(self, name: str, env: Mapping[str, str]) -> None:
        """Add to what every later task on this node finds in its environment; it outlives the instance."""
        node = self.node(name)
        node.env.update(env)
        self.write_env(node)

    def write_env(self, node: Node) -> None:
        """Write what the TaskProlog reads, whole or not at all."""
        own = {ENDPOINT: node.endpoint} if node.endpoint else {}
        text = conf.node_env_text({"SLURM_CONF": str(self.daemons.layout.conf), **own, **node.env})
        path = self.daemons.layout.node_env(node.name)
        draft = path.with_suffix(".new")
        draft.write_text(text)
        draft.replace(path)

    def set_boot(self, delay: float | None, fail: int | None) -> None:
        """Change how nodes boot from now on: the delay in seconds; how many resume calls find no capacity (-1: all)."""
        if delay is not None:
            self.boot_delay = delay
        if fail is not None:
            self.failing_boots = fail

    def processes(self, name: str | None, job: str | None) -> list[int]:
        """Return the pids on one node or all, without the nodes' init processes."""
        nodes = [self.node(name)] if name else list(self.nodes.values())
        return [pid for node in nodes if node.init for pid in processes_of(node.init, job)]

    def reap(self) -> None:
        """Notice nodes whose init someone else has killed: what was below it came to us, and dies as well."""
        processes = proc.snapshot()
        for node in self.nodes.values():
            if node.init is not None and processes[node.init].state in "ZX":
                self._end(node)
                node.state = "dead"
        known = {node.init for node in self.nodes.values()} | self.daemons.pids()
        for pid in [p.pid for p in processes.values() if p.parent == os.getpid() and p.pid not in known]:
            if pid != self.imds.pid and proc.read(pid):
                proc.kill_below(pid)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def status(self) -> dict[str, Any]:
        """Return what is known of the cluster and its nodes."""
        slurm = self.daemons.states()
        return {**self.daemons.facts(), "nodes": {n.name: _shown(n, slurm.get(n.name)) for n in self.nodes.values()}}

    def _scaled(self, seconds: float) -> float:
        return seconds * self.config.time_scale


def _shown(node: Node, slurm: str | None) -> dict[str, Any]:
    keys = ("state", "static", "instance_type", "instance_id", "endpoint", "deadline", "init", "env")
    return {**{key: getattr(node, key) for key in keys}, "slurm": slurm}


def _nodes(config: ClusterConfig) -> dict[str, Node]:
    resources = [cr for queue in config.view.queues for cr in queue.compute_resources]
    return {
        name: Node(name=name, static=static, instance_type=cr.instance_types[0])
        for cr in resources
        for name, static in cr.node_names()
    }
