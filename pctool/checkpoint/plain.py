"""The state of a loop that is no `pctool.train.Run`: tensors, and objects that have a state, by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import torch

from pctool.errors import UsageError


class PlainState:
    """Values by name, as torch.distributed.checkpoint takes them, saved as one state over all ranks.

    Tensors (DTensors, and dictionaries and lists of them) are loaded in place; what has `state_dict` and
    `load_state_dict` is asked for its state; any other value is put into the mapping anew.
    """

    has_own = False
    updates = False
    extra: Mapping[str, Any] = {}

    def __init__(self, values: MutableMapping[str, Any] | Mapping[str, Any]) -> None:
        if not isinstance(values, Mapping):
            raise UsageError(
                f"a {type(values).__name__} was given where a dictionary of what is to be saved is needed",
                fix="give {'model': model, 'optimizer': optimizer, ...}",
            )
        self._values = values

    def collect(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return the state, and nothing of this rank's own."""
        return {name: _state_of(value) for name, value in self._values.items()}, {}

    def late_pointers(self) -> frozenset[int]:
        """Return none: nobody says what changes when."""
        return frozenset()

    def template(self, own: Collection[str]) -> dict[str, Any]:
        """Return what is to be loaded into."""
        return self.collect()[0]

    def apply(self, state: dict[str, Any]) -> None:
        """Put a loaded state back."""
        for name, value in self._values.items():
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(state[name])
            elif not isinstance(value, torch.Tensor) and isinstance(self._values, MutableMapping):
                self._values[name] = state[name]


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else value
