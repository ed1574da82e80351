"""Read a job spec from TOML, from flags, or from Python, and resolve it to absolute paths.

Every error names the file, the line and the key. Relative paths (`run-dir`, the script, `output`, `chdir`, `template`,
an interpreter with a slash in it) are relative to the folder of the job file, or to the working directory for flags.
"""

from __future__ import annotations

import datetime
import difflib
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pctool.errors import UsageError
from pctool.job.check import check_script, check_spec, heterogeneous
from pctool.job.keys import (
    CHECKPOINT,
    CHECKPOINT_KEYS,
    ENVIRONMENT,
    HETEROGENEOUS,
    JOB_KEYS,
    SLURM_VALUE,
    STEPS_OR_TIME,
    SWITCH,
    TEXT,
    WHOLE,
    WORDS,
    Key,
)
from pctool.spec.job import JobSpec

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

STDIN = "-"


def load_job(path: str | Path, overrides: Mapping[str, Any] | None = None) -> JobSpec:
    """Return the resolved job spec of a TOML file; `-` reads standard input.

    `overrides` are field values that win over the file's; their relative paths are relative to the working directory.
    Raises UsageError with file and line for a file that is not there, is not TOML, or holds a key or value that pctool
    does not take, and for a script that is not there.
    """
    if str(path) == STDIN:
        where, base, text = "standard input", Path.cwd(), sys.stdin.read()
    else:
        where, base, text = str(path), Path(os.path.abspath(path)).parent, _read(path)
    fields = _absolute_fields(parse_job(text, where=where), base)
    given = _absolute_fields(dict(overrides or {}), Path.cwd())
    if "environment" in fields and "environment" in given:
        given["environment"] = {**fields["environment"], **given["environment"]}
    spec = _resolved({**fields, **given}, base, where=where)
    return check_script(spec, where=where)


def _read(path: str | Path) -> str:
    source = str(path)
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot read the job file: {error.strerror}", where=source, fix="give the path of a TOML file"
        ) from None
    except UnicodeDecodeError:
        raise UsageError("the job file is not UTF-8 text", where=source, fix="give the path of a TOML file") from None


def job_from_flags(values: Mapping[str, Any], *, base: str | Path | None = None) -> JobSpec:
    """Return the resolved job spec made of field values alone; relative paths are relative to `base` (default: cwd)."""
    folder = Path(base) if base else Path.cwd()
    return check_script(_resolved(_absolute_fields(dict(values), folder), folder))


def resolve_job(spec: JobSpec, *, base: str | Path | None = None) -> JobSpec:
    """Return a spec built in Python with its paths made absolute, checked as a file's would be."""
    folder = Path(base) if base else Path.cwd()
    fields = {field: getattr(spec, field) for field in ("command", *_PATHS)}
    return check_script(check_spec(replace(spec, **_absolute_fields(fields, folder))))


def parse_job(text: str, *, where: str) -> dict[str, Any]:
    """Return the field values written in a job file's text, types checked, nothing resolved."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        spot = f"{where}:{line[1]}" if line else where
        raise UsageError(f"not valid TOML: {error}", where=spot, fix='write keys as in `time = "2-00:00:00"`') from None
    reader = _Reader(text, where)
    fields: dict[str, Any] = {}
    for name, value in document.items():
        if name == CHECKPOINT:
            fields.update(reader.table(CHECKPOINT, value, CHECKPOINT_KEYS))
        elif name == ENVIRONMENT:
            fields["environment"] = reader.environment(value)
        else:
            fields.update(reader.entry("", name, value, JOB_KEYS))
    return fields


class _Reader:
    """Check keys and types of one document, and know the line of each key for messages."""

    def __init__(self, text: str, where: str) -> None:
        self._text = text
        self._where = where

    def entry(self, table: str, name: str, value: object, keys: Mapping[str, Key]) -> dict[str, Any]:
        key = keys.get(name)
        if key is None:
            raise self._unknown(table, name, keys)
        return {key.field: self._typed(table, name, value, key.kind)}

    def table(self, name: str, value: object, keys: Mapping[str, Key]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for key, entry in self._table(name, value).items():
            fields.update(self.entry(name, key, entry, keys))
        return fields

    def environment(self, value: object) -> dict[str, str]:
        return {
            name: self._typed(ENVIRONMENT, name, entry, SLURM_VALUE)
            for name, entry in self._table(ENVIRONMENT, value).items()
        }

    def _table(self, name: str, value: object) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        raise UsageError(
            f"{name!r} is a table", where=self._spot("", name), fix=f"write [{name}] and its keys on lines below it"
        )

    def _typed(self, table: str, name: str, value: object, kind: str) -> Any:
        typed = _convert(value, kind)
        if typed is None:
            shown = "a TOML time or date" if isinstance(value, datetime.time | datetime.date) else _toml_kind(value)
            raise UsageError(
                f"{_dotted(table, name)} takes a {kind}, not {shown}",
                where=self._spot(table, name),
                fix=f"write it as {name} = {_EXAMPLES[kind]}",
            )
        return typed

    def _unknown(self, table: str, name: str, keys: Mapping[str, Key]) -> UsageError:
        spot = self._spot(table, name)
        if name.replace("_", "-") in HETEROGENEOUS:
            return heterogeneous(spot)
        known = [*keys, *([] if table else [CHECKPOINT, ENVIRONMENT])]
        return UsageError(f"unknown key {_dotted(table, name)!r}", where=spot, fix=did_you_mean(name, known))

    def _spot(self, table: str, name: str) -> str:
        line = line_of(self._text, table, name)
        return f"{self._where}:{line}" if line else self._where


_EXAMPLES = {
    TEXT: '"text in quotes"',
    WHOLE: "4",
    SWITCH: "true",
    WORDS: '["train.py", "--lr", "3e-4"]',
    SLURM_VALUE: '"text in quotes"',
    STEPS_OR_TIME: '100, "10min" or "auto"',
}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the hint for a name that is not known: the nearest known one, or all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name.replace("_", "-"), names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"use one of: {', '.join(names)}"


def line_of(text: str, table: str, name: str) -> int | None:
    """Return the line (from 1) where a TOML key, or the header of the table `name`, is written; None if not found."""
    current = ""
    key = re.compile(rf"""\s*(?:{re.escape(name)}|"{re.escape(name)}"|'{re.escape(name)}')\s*[=.]""")
    inline = re.compile(rf"\s*{re.escape(table)}\s*[=.].*\b{re.escape(name)}\s*=") if table else None
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line)
        if header:
            current = header[1].strip("\"'")
            if not table and current.split(".")[0] == name:
                return number
        elif (current == table and key.match(line)) or (inline and not current and inline.match(line)):
            return number
    return None


def _convert(value: object, kind: str) -> Any:
    """Return the value as its kind has it, or None where the type is another."""
    if kind == SWITCH:
        return value if isinstance(value, bool) else None
    if kind == WHOLE:
        return value if isinstance(value, int) and not isinstance(value, bool) else None
    if kind == WORDS:
        return _words(value)
    if kind == SLURM_VALUE and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if kind == STEPS_OR_TIME and isinstance(value, int | str) and not isinstance(value, bool):
        return steps_or_time(value)
    return value if isinstance(value, str) else None


def steps_or_time(value: int | str) -> int | str:
    """Return a number of steps as the number it is, also where it was written as text; all else as written."""
    text = str(value).strip()
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else text


def _words(value: object) -> tuple[str, ...] | None:
    if isinstance(value, str):
        try:
            return tuple(shlex.split(value))
        except ValueError:
            return None
    if isinstance(value, list) and all(
        isinstance(word, str | int | float) and not isinstance(word, bool) for word in value
    ):
        return tuple(str(word) for word in value)
    return None


def _toml_kind(value: object) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a fraction", str: "text", list: "a list", dict: "a table"}
    return kinds.get(type(value), type(value).__name__)


def _dotted(table: str, name: str) -> str:
    return f"{table}.{name}" if table else name


_PATHS = ("run_dir", "output", "chdir", "template", "python")


def _resolved(fields: dict[str, Any], base: Path, *, where: str | None = None) -> JobSpec:
    if not fields.get("command"):
        raise UsageError(
            "the job has no command",
            where=where,
            fix='write command = ["train.py", ...] in the job file, or `-- train.py ...` behind the flags',
        )
    fields.setdefault("name", _default_name(fields["command"]))
    fields.setdefault("run_dir", _absolute(f"runs/{fields['name'].replace('/', '-')}", base))
    return check_spec(JobSpec(**fields), where=where)


def _default_name(command: tuple[str, ...]) -> str:
    """Name a job after its script: train/gpt.py -> gpt, -m package.train -> package.train."""
    if command[0] == "-m" and len(command) > 1:
        return command[1]
    return Path(command[0]).stem or "job"


def _absolute_fields(fields: dict[str, Any], base: Path) -> dict[str, Any]:
    """Return the fields with every relative path in them resolved against `base`; a bare `python3` stays a name."""
    paths = {field: fields[field] for field in _PATHS if fields.get(field)}
    if "/" not in paths.get("python", "/"):
        del paths["python"]
    absolute: dict[str, Any] = {field: _absolute(path, base) for field, path in paths.items()}
    command = fields.get("command")
    if command and not command[0].startswith("-"):
        absolute["command"] = (_absolute(command[0], base), *command[1:])
    return {**fields, **absolute}


def _absolute(path: str, base: Path) -> str:
    """Join and normalise without following links: a virtual environment's python is a link, and must stay one."""
    return os.path.abspath(base / os.path.expanduser(path))
