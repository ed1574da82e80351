"""What can be wrong with a node before its ranks run, by what it means for the job."""

from __future__ import annotations

from pctool.errors import PctoolError, UsageError


class NodeTroubleError(PctoolError):
    """The node or the file system is in trouble. Another node, or the same a little later, may do: peer-lost."""


class UnseenError(UsageError):
    """The node does not see the run directory: an error of the set-up, unless the run has started before."""
