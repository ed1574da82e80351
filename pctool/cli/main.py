"""`pctool`: find the verb, import only its module, run it, and turn errors into exit codes.

A verb is one line in VERBS and one module with `configure(parser)` and `run(args) -> int`. Top-level help is printed
from the table, so that it imports no verb at all.
"""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TextIO

from pctool.errors import INTERRUPTED, PctoolError, UsageError

if TYPE_CHECKING:
    from argparse import ArgumentParser


class Verb(NamedTuple):
    """One verb: its module, the task it belongs to, one line of help, one example."""

    module: str
    task: str
    summary: str
    example: str


SUBMIT = "Write and submit a job"
FOLLOW = "Follow and steer a job"
CHECK = "Check before it costs money"
INSIDE = "Used by the batch script and on the nodes"

VERBS: dict[str, Verb] = {
    "render": Verb("pctool.cli.render", SUBMIT, "print the batch script of a job", "pctool render job.toml"),
    "submit": Verb(
        "pctool.cli.submit", SUBMIT, "submit a job", "pctool submit -N 4 --gpus-per-node 8 -p p5spot -- train.py"
    ),
    "status": Verb("pctool.cli.status", FOLLOW, "attempt, step, newest checkpoint, next requeue", "pctool status 1234"),
    "logs": Verb("pctool.cli.logs", FOLLOW, "the log of rank 0, across attempts", "pctool logs -f 1234"),
    "attempts": Verb("pctool.cli.attempts", FOLLOW, "what happened in each attempt", "pctool attempts 1234"),
    "stop": Verb("pctool.cli.stop", FOLLOW, "save, then end the job (or go on)", "pctool stop 1234 --requeue"),
    "resume": Verb(
        "pctool.cli.resume", FOLLOW, "accept resuming below the newest step", "pctool resume 1234 --from 800"
    ),
    "nudge": Verb("pctool.cli.nudge", FOLLOW, "end the wait of requeued jobs", "pctool nudge --watch"),
    "ckpt": Verb(
        "pctool.cli.ckpt", FOLLOW, "list, verify, prune, mirror, restore, export checkpoints", "pctool ckpt ls RUN"
    ),
    "doctor": Verb("pctool.cli.doctor", CHECK, "check Slurm, storage, S3 and nodes", "pctool doctor -p p5spot"),
    "rehearse": Verb(
        "pctool.cli.rehearse",
        CHECK,
        "run the job on a private Slurm while nodes are lost",
        "pctool rehearse job.toml --cluster cluster.yaml --scenario notice",
    ),
    "local": Verb(
        "pctool.cli.local", CHECK, "a private Slurm on this machine", "pctool local up --cluster cluster.yaml"
    ),
    "claim": Verb("pctool.cli.claim", INSIDE, "claim the next attempt of a run", 'eval "$(pctool claim RUN)"'),
    "launch": Verb(
        "pctool.cli.launch",
        INSIDE,
        "run torchrun on this node and watch it",
        "srun pctool launch -- train.py",
    ),
    "decide": Verb(
        "pctool.cli.decide", INSIDE, "decide whether the job is requeued", "pctool decide RUN --srun-code 1"
    ),
    "watch": Verb("pctool.cli.watch", INSIDE, "watch this node for a spot notice", "pctool watch --drain"),
}

# What a file system says through a read or a write, where only the opening knew the file's name.
_STORAGE = {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.ESHUTDOWN}


def entry() -> None:
    """Run the console script."""
    code = main(sys.argv[1:])
    # What a full disk did not take is tried once more when the interpreter ends, and Python then exits with 120 instead
    # of the code: `decide` would end a job that it wants requeued.
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _discard(stream)
    sys.exit(code)


def main(argv: Sequence[str]) -> int:
    """Run one verb and return its exit code; the only place where errors become messages."""
    name = argv[0] if argv else ""
    try:
        try:
            return _dispatch(name, argv[1:])
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is no error
    except PctoolError as error:
        _say(f"pctool {name}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if (error.name or "pctool").partition(".")[0] == "pctool":
            raise  # a fault of ours
        _say(f"pctool {name}: the Python package {error.name!r} is not installed in {sys.prefix}")
        _say("  -> install pctool with what it needs: `pip install pctool` there")
        return UsageError.exit_code
    except OSError as error:
        # by its number: an evicted client of Lustre gets ESHUTDOWN, which Python calls a BrokenPipeError too
        if error.errno == errno.EPIPE and error.filename is None:
            _discard(sys.stdout)
            return 0
        if error.filename is None and error.errno not in _STORAGE:
            raise  # no file of the user's: a fault of ours
        _say(f"pctool {name}: {error.filename or 'a file'}: cannot be read or written: {error.strerror}")
        _say("  -> check the path, its permissions, and that the file system is there and has room")
        return UsageError.exit_code


def _dispatch(name: str, argv: Sequence[str]) -> int:
    if name == "help" and argv:
        return _dispatch(argv[0], ["--help"])
    if name in {"", "-h", "--help", "help"}:
        print(overview())
        return 0 if name else 2
    if name in {"-V", "--version"}:
        print(f"pctool {version()}")
        return 0
    if name not in VERBS:
        return _unknown(name)
    module = importlib.import_module(VERBS[name].module)
    instead = getattr(module, "run_instead", None)  # for words that are not of argparse's kind
    if instead is not None and (code := instead(argv)) is not None:
        return int(code)
    if not getattr(module, "TAKES_COMMAND", False):
        return int(module.run(parser(name).parse_args(argv)))
    cut = list(argv).index("--") if "--" in argv else len(argv)
    args, unknown = parser(name).parse_known_args(argv[:cut])
    args.before, args.unknown = list(argv[:cut]), unknown
    args.command = list(argv[cut + 1 :])  # argparse cannot tell it from a positional before it
    return int(module.run(args))


def parser(name: str) -> ArgumentParser:
    """Return the parser of one verb. This imports the verb's module, and no other's."""
    import argparse

    verb = VERBS[name]
    made = argparse.ArgumentParser(
        prog=f"pctool {name}",
        description=f"{verb.summary[0].upper()}{verb.summary[1:]}.",
        epilog=f"example:\n  {verb.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    importlib.import_module(verb.module).configure(made)
    return made


def _discard(stream: TextIO) -> None:
    """Point a stream at nothing: its reader has gone (`pctool attempts ... | head`), or its disk is full."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(text: str) -> None:
    """Print an error; where it cannot be printed the exit code must get through all the same."""
    with suppress(OSError):
        print(text, file=sys.stderr)


def overview() -> str:
    """Return the top-level help: the verbs by task, an example each."""
    lines = [
        "usage: pctool VERB ...",
        "",
        "From the batch script you have to a multi-node training job that survives losing its nodes.",
    ]
    width = max(len(name) for name in VERBS)
    for task in (SUBMIT, FOLLOW, CHECK, INSIDE):
        lines += ["", f"{task}:"]
        for name, verb in VERBS.items():
            if verb.task == task:
                lines += [f"  {name:<{width}}  {verb.summary}", f"  {'':<{width}}    {verb.example}"]
    return "\n".join([*lines, "", "`pctool VERB --help` tells the rest. --version prints the version."])


def version() -> str:
    """Return the installed version."""
    from importlib.metadata import version as installed

    return installed("pctool")


def _unknown(name: str) -> int:
    import difflib

    near = difflib.get_close_matches(name, VERBS, n=1)
    hint = f"did you mean `pctool {near[0]}`?" if near else "`pctool --help` lists the verbs"
    print(f"pctool: no verb {name!r}\n  -> {hint}", file=sys.stderr)
    return 2
