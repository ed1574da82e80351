"""`pctool ckpt ls|verify|prune|mirror|restore|export`: look at checkpoints, prove them, and move them."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path

from pctool.cli.ckpt_common import Meter
from pctool.errors import UsageError

EXAMPLES = """example:
  pctool ckpt ls /fsx/runs/gpt                                  # which there are, and which one is resumed
  pctool ckpt verify /fsx/runs/gpt --all                        # every byte of every one
  pctool ckpt restore s3://bucket/ckpts/gpt /fsx/runs/gpt       # bring the newest one back
  pctool ckpt export /fsx/runs/gpt gpt.safetensors --dtype bf16"""

TARGET = "a run directory, a checkpoint in it, a job id, or the s3:// address of a run"
# action -> the module with its function of the same name: only that one is imported
_MODULES = {
    "ls": "pctool.cli.ckpt_show",
    "verify": "pctool.cli.ckpt_show",
    "prune": "pctool.cli.ckpt_change",
    "mirror": "pctool.cli.ckpt_change",
    "restore": "pctool.cli.ckpt_change",
    "export": "pctool.cli.ckpt_export",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their options."""
    parser.epilog = EXAMPLES
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    ls = _action(actions, "ls", "list checkpoints, newest first, complete or not, on every tier")
    ls.add_argument("target", metavar="TARGET", help=TARGET)
    _at(ls)
    verify = _action(actions, "verify", "check every byte: of the newest, of one, or of all")
    verify.add_argument("target", metavar="TARGET", help=TARGET)
    which = verify.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", dest="every", help="check all that are there")
    _at(which)
    verify.add_argument(
        "--read", action="store_true", help="on S3 download the bytes, rather than ask for its checksums"
    )
    _progress(verify)
    _configure_changes(actions)
    _configure_export(_action(actions, "export", "make one file of a checkpoint, for torch.load or safetensors"))


def _configure_changes(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    prune = _action(actions, "prune", "remove old ones, never fewer than two complete ones stay")
    prune.add_argument("run", metavar="RUN", help="a run directory, or a job id")
    prune.add_argument("--keep", type=_count, metavar="N", help="how many of the newest stay, on each tier")
    prune.add_argument("--keep-for", type=_age, metavar="AGE", help="keep those younger than this, as in 7d")
    prune.add_argument("--keep-every", type=_count, metavar="N", help="keep the first in each N steps")
    prune.add_argument("--dry-run", action="store_true", help="say what would be removed")
    mirror = _action(actions, "mirror", "copy to S3 now what is not there")
    mirror.add_argument("run", metavar="RUN", help="a run directory, or a job id")
    restore = _action(actions, "restore", "bring a checkpoint from S3 into a run directory")
    restore.add_argument("source", metavar="SOURCE", help="the s3:// address of a run, or a run directory with a store")
    restore.add_argument("run", metavar="RUN", nargs="?", help="where to, if SOURCE is an address")
    _at(restore)
    _progress(restore)


def _configure_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help=TARGET)
    parser.add_argument("out", metavar="OUT", type=Path, help="NAME.pt or NAME.safetensors")
    _at(parser)
    parser.add_argument(
        "--only", metavar="PART", help="model, optimizer, scheduler or a name of extra (safetensors: model)"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="turn the model's floating numbers into this")
    parser.add_argument("--force", action="store_true", help="overwrite OUT")
    _progress(parser)


def run(args: argparse.Namespace) -> int:
    """Do one action and return its exit code."""
    function: Callable[[argparse.Namespace], int] = getattr(importlib.import_module(_MODULES[args.action]), args.action)
    try:
        return function(args)
    finally:
        Meter.end_line()


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
    parser.add_argument("--store", metavar="URL", help="s3://bucket/prefix of the S3 tier (default: as in job.toml)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _at(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--at", metavar="NAME", help="one checkpoint, as in 000003-00001200")


def _progress(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--progress", action="store_true", help="show progress also where stderr is no terminal")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(
            f"{text!r} is not a number of checkpoints or steps",
            fix="give a whole number; fewer than two checkpoints are never kept",
        )
    return int(text)


def _age(text: str) -> float | None:
    from pctool.checkpoint.retention import parse_keep_for

    return parse_keep_for(text, name="--keep-for")
