"""The slurm.conf settings of a ParallelCluster cluster, what a config changes in them, and how time is scaled. Pure.

The fixed values are those of slurm.conf.erb in the ParallelCluster cookbook 3.12; what is not named there has Slurm's
default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

CRED_EXPIRE_S = 70  # ParallelCluster's AuthInfo
CLUSTERMGTD_PERIOD_S = 60  # how often clustermgtd looks at the nodes
POWER_SAVE_INTERVAL_S = 10  # Slurm's default
POWER_SAVE_MIN_INTERVAL_S = 30  # ParallelCluster's

FIXED: dict[str, str] = {
    "SelectType": "select/cons_tres",
    "GresTypes": "gpu",
    "TreeWidth": "30",
    "PrivateData": "cloud",  # powered-down nodes are shown
    "ResumeRate": "0",
    "SuspendRate": "0",
    "ResumeTimeout": "2100",  # 3.16's node bootstrap timeout
    "SuspendTimeout": "120",
    "BatchStartTimeout": "180",
    "MessageTimeout": "60",
    "SlurmdTimeout": "180",
    "UnkillableStepTimeout": "180",
    "ReturnToService": "1",
    "MpiDefault": "none",
    "KillWait": "30",  # Slurm's default, written so that it is scaled; so the next two
    "InactiveLimit": "0",
    "SlurmctldTimeout": "120",
    "JobRequeue": "1",
    "JobFileAppend": "0",
}

# Seconds, and so scaled. 0 and below mean "off" or "for ever" and stay. MinJobAge is left alone on purpose: it is how
# long a finished job can be asked for, and nothing waits for it.
TIMES = frozenset(
    {
        "batchstarttimeout",
        "completewait",
        "epilogmsgtime",
        "healthcheckinterval",
        "inactivelimit",
        "killwait",
        "messagetimeout",
        "prologepilogtimeout",
        "resumetimeout",
        "slurmctldtimeout",
        "slurmdtimeout",
        "suspendtime",
        "suspendtimeout",
        "tcptimeout",
        "unkillablesteptimeout",
        "waittime",
    }
)
# A scaled time-out of the wire still has to outlast a loaded machine; nothing waits for these to pass.
FLOORS = {"messagetimeout": 10, "tcptimeout": 2, "batchstarttimeout": 10, "resumetimeout": 10}
CRED_FLOOR_S = 5  # Slurm calls less invalid and takes its own default, 120 (seen on 22.05.8)

# Settings of a config that a private cluster cannot have, and why. They are reported, never silently dropped.
_PATHS = "it names a program or folder of the real nodes"
_ACCOUNTING = "a private cluster has no accounting"
_OURS = "the private cluster sets it"
NOT_MIRRORED: dict[str, str] = {
    **dict.fromkeys(("prolog", "epilog", "taskprolog", "taskepilog", "srunprolog", "srunepilog"), _PATHS),
    **dict.fromkeys(("prologslurmctld", "epilogslurmctld", "healthcheckprogram", "rebootprogram", "mailprog"), _PATHS),
    **dict.fromkeys(("plugindir", "plugstackconfig", "jobsubmitplugins", "clifilterplugins", "include"), _PATHS),
    **dict.fromkeys(("jobcomptype", "jobcomploc", "jobcomphost", "burstbuffertype", "licenses"), _PATHS),
    **dict.fromkeys(("accountingstoragetype", "accountingstoragehost", "accountingstorageport"), _ACCOUNTING),
    **dict.fromkeys(("accountingstorageenforce", "accountingstoragetres", "jobacctgathertype"), _ACCOUNTING),
    **dict.fromkeys(("jobacctgatherfrequency", "accountingstorageuser", "accountingstorageexternalhost"), _ACCOUNTING),
    **dict.fromkeys(("slurmctldhost", "slurmctldport", "slurmdport", "slurmuser", "slurmduser"), _OURS),
    **dict.fromkeys(("slurmctldlogfile", "slurmdlogfile", "slurmctldpidfile", "slurmdpidfile", "clustername"), _OURS),
    **dict.fromkeys(("statesavelocation", "slurmdspooldir", "authtype", "credtype", "proctracktype"), _OURS),
    **dict.fromkeys(("taskplugin", "resumeprogram", "suspendprogram", "resumefailprogram", "slurmdparameters"), _OURS),
}


def scaled(seconds: float, scale: float, *, least: int = 1) -> int:
    """Return a time multiplied by the scale in whole seconds, at least `least`; 0 and below stay as they are."""
    return int(seconds) if seconds <= 0 else max(least, round(seconds * scale))


class Settings:
    """slurm.conf settings, the last one of a key winning whatever its case, as in Slurm."""

    def __init__(self, pairs: Mapping[str, str]) -> None:
        self._pairs = {key.lower(): (key, value) for key, value in pairs.items()}

    def put(self, key: str, value: str) -> None:
        """Set one value; the spelling that was there first stays."""
        spelling = self._pairs.get(key.lower(), (key, ""))[0]
        self._pairs[key.lower()] = (spelling, value)

    def get(self, key: str) -> str | None:
        """Return one value, or None."""
        found = self._pairs.get(key.lower())
        return found[1] if found else None

    def lines(self) -> list[str]:
        """Return the lines of slurm.conf."""
        return [f"{key}={value}" for key, value in self._pairs.values()]

    def scale(self, factor: float) -> None:
        """Multiply every time in here; with factor 1 nothing changes."""
        if factor == 1:
            return
        for low, (key, value) in list(self._pairs.items()):
            if low in TIMES and value.lstrip("-").isdigit():
                self._pairs[low] = (key, str(scaled(int(value), factor, least=FLOORS.get(low, 1))))


def mirrored(custom: Iterable[tuple[str, str]]) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Part CustomSlurmSettings into those a private cluster takes over and {key: why not} of the others."""
    taken, left = [], {}
    for key, value in custom:
        why = NOT_MIRRORED.get(key.lower())
        if why is None:
            taken.append((key, value))
        else:
            left[key] = why
    return taken, left


def scheduler_parameters(written: str | None, scale: float) -> str | None:
    """Return SchedulerParameters with the scheduler's own periods scaled (main 60 s, backfill 30 s by default)."""
    if scale == 1:
        return written
    words = [word for word in (written or "").split(",") if word]
    given = {key: value for key, _, value in (word.partition("=") for word in words)}
    others = [word for word in words if word.partition("=")[0] not in {"sched_interval", "bf_interval"}]
    periods = {key: int(given.get(key) or base) for key, base in (("sched_interval", 60), ("bf_interval", 30))}
    return ",".join([*others, *(f"{key}={scaled(value, scale)}" for key, value in periods.items())])


def auth_info(written: str | None, socket: str, scale: float) -> str:
    """Return AuthInfo: our munge socket, the config's other words, and the scaled life of a credential."""
    words = [word for word in (written or "").split(",") if word and not word.startswith("socket=")]
    given = {key: value for key, _, value in (word.partition("=") for word in words)}
    expire = int(given.get("cred_expire") or CRED_EXPIRE_S)
    others = [word for word in words if not word.startswith("cred_expire=")]
    least = min(CRED_FLOOR_S, expire)
    return ",".join([f"socket={socket}", f"cred_expire={scaled(expire, scale, least=least)}", *others])
