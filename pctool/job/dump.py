"""Write a job spec as the TOML that reads back to the same spec."""

from __future__ import annotations

import json
import re
from typing import Any

from pctool.job.keys import CHECKPOINT, CHECKPOINT_KEYS, ENVIRONMENT, JOB_KEYS
from pctool.spec.job import JobSpec


def job_document(spec: JobSpec) -> dict[str, Any]:
    """Return the spec as the values of its TOML file, without keys that are unset."""
    document: dict[str, Any] = {
        key: getattr(spec, entry.field) for key, entry in JOB_KEYS.items() if getattr(spec, entry.field) is not None
    }
    document["command"] = list(spec.command)
    checkpoint = {
        key: getattr(spec, entry.field)
        for key, entry in CHECKPOINT_KEYS.items()
        if getattr(spec, entry.field) is not None
    }
    if checkpoint:
        document[CHECKPOINT] = checkpoint
    if spec.environment:
        document[ENVIRONMENT] = dict(spec.environment)
    return document


def dump_job(spec: JobSpec) -> str:
    """Return the text of RUN/job.toml."""
    document = job_document(spec)
    lines = [_line(key, value) for key, value in document.items() if not isinstance(value, dict)]
    for name, table in document.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]", *(_line(key, value) for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _line(key: str, value: object) -> str:
    name = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)
    return f"{name} = {_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(_text(word) for word in value)}]"
    return _text(str(value))


def _text(value: str) -> str:
    """Write a basic string. JSON's escapes are TOML's too, but for DEL, which JSON leaves bare and TOML forbids."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
