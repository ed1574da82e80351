"""Slurm's notations for time, memory and signals, durations with units, and how sizes and durations are printed."""

from __future__ import annotations

import re
import signal as _signal
from dataclasses import dataclass

from pctool.errors import UsageError

_TIME_FORMS = "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes[:seconds]"
_MEMORY = re.compile(r"([0-9]+)([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)
_KIB_PER_UNIT = {"K": 1, "M": 1024, "G": 1024**2, "T": 1024**3}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]+)", re.IGNORECASE | re.ASCII)
_SECONDS_PER_UNIT = {"s": 1, "sec": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION_RANGE_S = (0.001, 100 * 365 * 86400)  # beyond it lies a slip of the keyboard


def parse_time(text: str) -> int | None:
    """Return seconds for a time limit as sbatch reads it; None for UNLIMITED.

    Raises UsageError for anything sbatch would refuse. Source: man sbatch, --time.
    """
    if text.strip().upper() in {"UNLIMITED", "INFINITE"}:
        return None
    days, dash, rest = text.strip().rpartition("-")
    parts = rest.split(":")
    if not all(map(_is_number, parts)) or (dash and not _is_number(days)) or len(parts) > 3:
        raise UsageError(f"time limit {text!r} is not a Slurm time", fix=f"write it as one of: {_TIME_FORMS}")
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    minutes, seconds = [*numbers, 0][:2]
    return minutes * 60 + seconds


def _is_number(text: str) -> bool:
    """Return whether `text` is decimal digits and nothing else; str.isdigit() takes other scripts' digits too."""
    return text.isascii() and text.isdigit()


def format_time(seconds: int) -> str:
    """Write seconds as Slurm prints a time limit: [days-]HH:MM:SS."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def parse_duration(text: str) -> float:
    """Return seconds for a duration with units, such as 90s, 10min, 1h30min, 7d; raise UsageError for another text.

    Not Slurm's notation, in which 90 is minutes: without a unit nothing is taken. Nor is a bare `m`, since 6m of
    keeping would be six months to one and six minutes to another.
    """
    parts = [(float(number), unit.lower()) for number, unit in _DURATION.findall(text)]
    known = all(unit in _SECONDS_PER_UNIT for _, unit in parts)
    if not parts or not known or _DURATION.sub("", text).strip():
        why = ": m could be minutes or months" if any(unit == "m" for _, unit in parts) else ""
        raise UsageError(f"{text!r} is not a duration{why}", fix="write it as in 90s, 10min, 1h30min or 7d")
    seconds = sum(number * _SECONDS_PER_UNIT[unit] for number, unit in parts)
    least, most = _DURATION_RANGE_S
    if not least <= seconds <= most:
        raise UsageError(f"{text!r} is too {'short' if seconds < least else 'long'}", fix="write it as in 90s or 7d")
    return seconds


def parse_memory_mib(text: str) -> int:
    """Return MiB for a --mem value (a bare number is MiB); raise UsageError for what sbatch refuses."""
    match = _MEMORY.fullmatch(text.strip())
    if not match:
        raise UsageError(
            f"memory {text!r} is not a Slurm size", fix="write a whole number with K, M, G or T, as in 512G"
        )
    kib = int(match[1]) * _KIB_PER_UNIT[(match[2] or "M").upper()]
    return kib // 1024


@dataclass(frozen=True, kw_only=True)
class SignalOption:
    """sbatch's --signal=[B:]SIG[@seconds]."""

    name: str
    seconds: int
    batch_only: bool


def parse_signal(text: str) -> SignalOption:
    """Read a --signal value; `name` comes back without SIG, seconds default to 60 as in sbatch."""
    match = re.fullmatch(r"(?:(R|B|RB|BR):)?([A-Za-z0-9+]+)(?:@([0-9]+))?", text.strip())
    name = match[2].upper().removeprefix("SIG") if match else ""
    if name.isdigit():
        numbers = {int(s.value): s.name.removeprefix("SIG") for s in _signal.Signals}
        name = numbers.get(int(name), "")
    if not match or not hasattr(_signal, f"SIG{name}"):
        raise UsageError(f"signal {text!r} is not what --signal takes", fix="write it as B:USR1@300")
    seconds = int(match[3]) if match[3] else 60
    if seconds > 65535:
        raise UsageError(f"signal {text!r}: the lead is at most 65535 seconds", fix="use a shorter lead")
    return SignalOption(name=name, seconds=seconds, batch_only="B" in (match[1] or ""))


def format_bytes(count: float) -> str:
    """Write a byte count with a binary unit: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_duration(seconds: float) -> str:
    """Write a duration for people: 4.2 s, 3 min 05 s, 2 h 07 min."""
    if seconds < 59.95:  # what rounds to 60.0 is written as a minute
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole // 60 % 60:02d} min"
