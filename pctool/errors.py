"""The one tree of errors a user can meet. Each class owns the exit code of the command line."""

from __future__ import annotations


class PctoolError(Exception):
    """Say what is wrong, where, and what to do next.

    `where` is a file, a file:line, or a path inside a document; `fix` is one imperative sentence.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n  -> {self.fix}" if self.fix else head


class UsageError(PctoolError):
    """Bad input: a flag, a file, a key, a value."""

    exit_code = 2


class SlurmError(PctoolError):
    """Slurm refused, did not answer, or is not there."""

    exit_code = 3


class AwsError(PctoolError):
    """S3, EC2 or the instance metadata service refused or did not answer."""

    exit_code = 3


class RunInUseError(SlurmError):
    """Another job holds this run directory."""


class FencedError(SlurmError):
    """A newer attempt of this run exists, so this one may publish, prune and requeue nothing."""


class NotFoundError(PctoolError):
    """What was named is not there."""

    exit_code = 4


class IncompleteError(PctoolError):
    """A checkpoint (or a run) is there but not complete, or its bytes are not what its manifest says."""

    exit_code = 4


INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it
REQUEUE = 85  # ERESTART; what RequeueExit names on our clusters
HOLD = 86  # what RequeueExitHold names on our clusters
