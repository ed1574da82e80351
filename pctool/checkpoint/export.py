"""Make one file of a checkpoint: what torch.load reads, or safetensors.

Nothing is believed before every byte of the checkpoint was checked. The file appears whole or not at all.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO

from pctool.checkpoint import manifest as mf
from pctool.checkpoint.fetch import check_room, fetch
from pctool.checkpoint.listing import Row, list_checkpoints
from pctool.checkpoint.safetensors import TensorInfo, lay_out
from pctool.checkpoint.stores import PosixStore
from pctool.checkpoint.target import Target
from pctool.checkpoint.verify import Report, verify_copy
from pctool.errors import IncompleteError, NotFoundError, UsageError
from pctool.run.layout import fsync_dir

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

SUFFIXES = (".pt", ".safetensors")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MODEL = "model"
_FLOATS = {"float64", "float32", "float16", "bfloat16"}  # what --dtype turns into another
_PER_ENTRY = 4096  # bytes that torch.save adds to an entry at most, names and alignment

Progress = Callable[[int], None]  # is called with the bytes of each tensor that was written


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is exported: one part (None: all that the format takes), and the type of the model's floating numbers."""

    only: str | None = None
    dtype: str | None = None  # one of DTYPES
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The file that was written. `left_out` names the entries of the chosen part that are not in it, and why."""

    path: Path
    bytes: int
    tensors: int
    left_out: dict[str, str]


def check_out(out: Path, *, force: bool) -> None:
    """Raise UsageError for a file that cannot be written as asked, before anything long is begun."""
    if out.suffix not in SUFFIXES:
        raise UsageError(
            f"{out.name!r} does not say which format it is to be",
            where=str(out),
            fix="call it NAME.pt (torch.load reads it) or NAME.safetensors",
        )
    if not out.parent.is_dir():
        raise UsageError("there is no such folder", where=str(out.parent), fix="make it first")
    if out.is_dir():
        raise UsageError("this is a folder", where=str(out), fix="give the name of a file")
    if out.exists() and not force:
        raise UsageError("this file is there already", where=str(out), fix="choose another name, or use --force")


def export_target(
    target: Target, out: Path, options: Options, tell: Callable[[str, mf.Manifest], Progress]
) -> tuple[str, Exported]:
    """Export the checkpoint that is named, or the one that the run would go on from; return its name and the file.

    `tell` is called before the bytes are checked (or fetched, of what only S3 has) and before they are written. Raises
    IncompleteError where a byte of it is wrong, NotFoundError where none is complete, and what `export` raises.
    """
    check_out(out, force=options.force)
    row = _chosen(target)
    manifest = row.manifest
    assert manifest is not None
    local = target.store_of("posix") if "posix" in row.tiers else None
    if isinstance(local, PosixStore):
        _refuse_damaged(verify_copy(local, row.name, tell=tell("checking", manifest)))
        return row.name, export(local.folder / row.name, manifest, out, options, tell("writing", manifest))
    with TemporaryDirectory(dir=out.parent, prefix=".pctool-export-") as scratch:
        got = fetch(target.stores[-1], row.name, Path(scratch), tell=lambda manifest: tell("fetching", manifest))
        return row.name, export(got.folder, manifest, out, options, tell("writing", manifest))


def export(folder: Path, manifest: mf.Manifest, out: Path, options: Options, progress: Progress) -> Exported:
    """Write a checkpoint's folder, whose every byte is good, to one file.

    Raises NotFoundError for a part that it does not have, UsageError for what the format cannot hold, NoRoomError.
    """
    check_out(out, force=options.force)
    source = _Source(folder)
    write = _write_torch if out.suffix == ".pt" else _write_safetensors
    return write(source, manifest, out, options, progress)


def as_json(name: str, done: Exported) -> dict[str, Any]:
    """Return the stable JSON shape of `pctool ckpt export --json`."""
    return {
        "name": name,
        "file": str(done.path),
        "bytes": done.bytes,
        "tensors": done.tensors,
        "left_out": [{"entry": entry, "why": why} for entry, why in sorted(done.left_out.items())],
    }


def _chosen(target: Target) -> Row:
    """Return the checkpoint to export. Raise IncompleteError for one that is not complete on any tier."""
    listing = list_checkpoints(target)
    complete = [row for row in listing.rows if row.tiers]
    row = next((row for row in complete if row.resume), next(iter(complete), None))
    if row is None:
        why = f": {'; '.join(listing.rows[0].notes)}" if listing.rows else ""
        raise IncompleteError(f"no complete checkpoint here{why}", where=target.where, fix="see `pctool ckpt ls`")
    return row


def _refuse_damaged(report: Report) -> None:
    if not report.ok:
        why = "; ".join(f"{finding.file}: {finding.what}" for finding in report.findings)
        raise IncompleteError(
            f"damaged: {why}",
            where=report.where,
            fix="repair it from S3 with `pctool ckpt restore`, or export another one with --at",
        )


class _Source:
    """The entries of a DCP folder; its index is read once."""

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        self.folder = folder
        self.reader: FileSystemReader = _caching(FileSystemReader)(folder)
        self.index: Metadata = self.reader.read_metadata()

    @property
    def parts(self) -> list[str]:
        """Return the names under which parts of the training were saved."""
        extra = {"/".join(key.split("/")[:2]) for key in self.entries if key.startswith("extra/")}
        return sorted(extra | {key.split(".")[0] for key in self.entries if not key.startswith("extra/")})

    @property
    def entries(self) -> list[str]:
        """Return the flat names of all that was saved."""
        return list(self.index.state_dict_metadata)

    def of_part(self, part: str | None) -> list[str]:
        """Return the entries of a part, all for None. Raise NotFoundError for one that is not there."""
        found = [key for key in self.entries if part is None or key == part or key.startswith((f"{part}.", f"{part}/"))]
        if not found:
            raise NotFoundError(
                f"this checkpoint has no part {part!r}",
                where=str(self.folder),
                fix=f"choose one of: {', '.join(self.parts)}",
            )
        return found

    def tensor_info(self, key: str) -> TensorInfo | None:
        """Return an entry's type and shape, None for one that is no tensor."""
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        entry = self.index.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        return TensorInfo(dtype=_name_of(entry.properties.dtype), shape=tuple(entry.size))

    def load(self, keys: list[str]) -> dict[str, Any]:
        """Return some entries, read in this process alone."""
        import torch
        from torch.distributed.checkpoint.state_dict_loader import load

        from pctool.checkpoint.torch import quiet

        infos = {key: self.tensor_info(key) for key in keys}
        state: dict[str, Any] = {
            key: torch.empty(info.shape, dtype=getattr(torch, info.dtype)) if info else ""
            for key, info in infos.items()
        }
        with quiet():
            load(state, storage_reader=self.reader, no_dist=True)
        return state

    def nested(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state dictionary that was saved, of its flat entries."""
        from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

        places = self.index.planner_data or {}
        return unflatten_state_dict(dict(flat), {key: places.get(key, (key,)) for key in flat})


def _caching(reader: type[FileSystemReader]) -> type[FileSystemReader]:
    class Caching(reader):  # type: ignore[valid-type, misc]
        """DCP reads its index anew for each load, and we load a tensor at a time."""

        _index: Metadata | None = None

        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            if self._index is None:
                self._index = super().read_metadata(*args, **kwargs)
            return self._index

    return Caching


def _write_torch(source: _Source, manifest: mf.Manifest, out: Path, options: Options, progress: Progress) -> Exported:
    import torch

    keys = source.of_part(options.only)
    infos = {key: info for key in keys if (info := source.tensor_info(key))}
    size = sum(_cast_info(key, info, options).bytes for key, info in infos.items()) + _PER_ENTRY * len(keys)
    check_room(out.parent, size)
    flat: dict[str, Any] = {}
    for key in keys:
        value = source.load([key])[key]
        if isinstance(value, torch.Tensor):
            progress(value.nbytes)
            value = value.to(getattr(torch, _cast_info(key, infos[key], options).dtype))
        flat[key] = value
    left_out = {key: why for key, value in flat.items() if key not in infos and (why := _unreadable(value))}
    state = source.nested({key: value for key, value in flat.items() if key not in left_out})
    with _whole_file(out, force=options.force) as file:
        torch.save(state, file)
    return Exported(path=out, bytes=out.stat().st_size, tensors=len(infos), left_out=left_out)


def _write_safetensors(
    source: _Source, manifest: mf.Manifest, out: Path, options: Options, progress: Progress
) -> Exported:
    import torch

    part = options.only or MODEL
    keys = source.of_part(part)
    infos = {key: _cast_info(key, info, options) for key in keys if (info := source.tensor_info(key))}
    named = {key.removeprefix(f"{part}."): key for key in infos}
    said = {"format": "pt", "step": str(manifest.step), "run": manifest.run}  # readers look for the format alone
    layout = lay_out({name: infos[key] for name, key in named.items()}, said)
    check_room(out.parent, layout.bytes)
    with _whole_file(out, force=options.force) as file:
        file.write(layout.head)
        for name in layout.order:
            key = named[name]
            tensor = source.load([key])[key].to(getattr(torch, infos[key].dtype))
            file.write(_bytes_of(tensor))
            progress(tensor.nbytes)
    left_out = dict.fromkeys((key for key in keys if key not in infos), "no tensor")
    return Exported(path=out, bytes=layout.bytes, tensors=len(infos), left_out=left_out)


def _cast_info(key: str, info: TensorInfo, options: Options) -> TensorInfo:
    """Return a tensor's type and shape after --dtype, which holds for the chosen part, or else for the model alone.

    An optimizer's step count or second moments would be ruined by 16 bits.
    """
    part = options.only or MODEL
    if options.dtype is None or info.dtype not in _FLOATS or not key.startswith((f"{part}.", f"{part}/")):
        return info
    return TensorInfo(dtype=DTYPES[options.dtype], shape=info.shape)


def _unreadable(value: Any) -> str:
    """Return why torch.load would refuse a file with this value in it, "" if it would not.

    torch.load takes plain values only, unless told to run whatever code a file holds.
    """
    import pickle

    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError:
        kind = type(value)
        return f"torch.load(weights_only=True) does not take a {kind.__module__}.{kind.__qualname__}"
    return ""


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _whole_file(out: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Yield a file that is there under its name once it is whole and durable, and leaves nothing otherwise."""
    temp = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with temp.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        check_out(out, force=force)  # it may have come to be meanwhile
        temp.rename(out)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    fsync_dir(out.parent)
