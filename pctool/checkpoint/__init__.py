"""Checkpoints: complete only with a manifest, on a shared file system and on S3.

`Checkpointer` is imported when it is first used: the writers and the mirror need none of it, nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pctool.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer"]


def __getattr__(name: str) -> Any:
    if name == "Checkpointer":
        from pctool.checkpoint.checkpointer import Checkpointer

        return Checkpointer
    raise AttributeError(f"module 'pctool.checkpoint' has no attribute {name!r}")
