"""What doctor runs on a node, through srun: `python -m pctool.job.probe OPTIONS`. Prints one JSON line."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pctool.aws.imds import DEFAULT_ENDPOINT, Imds
from pctool.errors import PctoolError
from pctool.run import env
from pctool.run.layout import write_atomic

HERE, THERE = "from-here", "from-the-node"  # the files by which both sides see whether a folder is shared
_IMPORT_TORCH_S = 120.0  # a cold import over a loaded shared file system; 10 s are usual


def probe(*, folder: str | None, nonce: str, store: str | None, python: str) -> dict[str, Any]:
    """Return what this node sees: the shared folder, instance metadata, S3, torch. None: not asked for."""
    return {
        "node": os.environ.get("SLURMD_NODENAME", ""),
        "shared": _see(Path(folder), nonce) if folder else None,
        "imds": _imds(os.environ),
        "store": canary(store) if store else None,
        "torch": _torch(python),
    }


def canary(store: str) -> str:
    """Write, look at, read and delete a small object under `store`; return '' or what went wrong.

    The write is conditional, since MANIFESTs are published that way: a second one must be refused. An upload in parts
    is begun, listed and aborted too: the mirror goes on with what one that was killed left.
    """
    from pctool.aws.s3 import S3

    key, data = f"pctool-doctor-{secrets.token_hex(8)}", b"canary"
    try:
        s3 = S3(store)
        made = s3.put_new(key, data)
        again = s3.put_new(key, data)
        kept, read = s3.stored(key), s3.read(key)
        s3.delete([key])
        s3.check_uploads(key)
    except PctoolError as error:
        return str(error)
    if not made or again:
        return f"{store} ignores If-None-Match, so two attempts could publish the same checkpoint"
    if kept is None or kept.size != len(data) or read != data:
        return f"{store} gave back {read!r} for {data!r}"
    return ""


def _see(folder: Path, nonce: str) -> str:
    """Return '' if the file written where doctor runs is here, else why not; leave one for the other side."""
    try:
        found = (folder / HERE).read_text()
        if found != nonce:
            return f"{folder / HERE} holds something else"
        write_atomic(folder / THERE, nonce.encode())
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror}"
    return ""


def _imds(environ: Mapping[str, str]) -> dict[str, str]:
    imds = Imds(environ.get(env.IMDS) or DEFAULT_ENDPOINT)
    try:
        instance, kind = imds.instance_id(), imds.get("instance-type")
    except PctoolError as error:
        return {"error": str(error)}
    return {"instance": instance or "", "type": kind or ""}


def _torch(python: str) -> dict[str, str]:
    code = "import torch; print(torch.__version__, torch.cuda.device_count())"
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, errors="replace", timeout=_IMPORT_TORCH_S, check=False
        )
    except OSError as error:
        return {"error": f"{python}: {error.strerror}"}
    except subprocess.TimeoutExpired:
        return {"error": f"`import torch` took more than {_IMPORT_TORCH_S:.0f} s"}
    if done.returncode != 0:
        return {"error": (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]}
    version, gpus = done.stdout.split()[-2:]
    return {"version": version, "gpus": gpus}


def main() -> int:
    """Read the options as one JSON object in the first argument, and print the answer."""
    options = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps(probe(**options)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
