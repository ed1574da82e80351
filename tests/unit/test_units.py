"""Slurm's notations, against the table in sbatch's manual."""

from __future__ import annotations

import re
import signal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pctool import units
from pctool.errors import UsageError

numbers = st.integers(min_value=0, max_value=9999)

# man sbatch, --time: "minutes", "minutes:seconds", "hours:minutes:seconds", "days-hours", "days-hours:minutes" and
# "days-hours:minutes:seconds"
TIMES = {
    "90": 90 * 60,
    "90:30": 90 * 60 + 30,
    "2:03:04": 2 * 3600 + 3 * 60 + 4,
    "1-2": 26 * 3600,
    "1-2:30": 26 * 3600 + 30 * 60,
    "1-02:30:15": 26 * 3600 + 30 * 60 + 15,
    "0": 0,
    "UNLIMITED": None,
    "infinite": None,
}


@pytest.mark.parametrize(("text", "seconds"), TIMES.items())
def test_reads_every_form_of_the_manual(text: str, seconds: int | None) -> None:
    assert units.parse_time(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "-", "1-", "-5", "1:2:3:4", "1-1:2:3:4", "1h", "1.5", "a-1", "1--2", " ", "1:", "+5", "²", "٣"]
)
def test_refuses_what_is_no_time(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        units.parse_time(text)
    assert repr(text) in str(caught.value)
    assert "hours:minutes:seconds" in str(caught.value)


@given(st.integers(min_value=0, max_value=10**8))
def test_reads_back_the_times_it_writes(seconds: int) -> None:
    assert units.parse_time(units.format_time(seconds)) == seconds


@given(numbers, st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_writes_times_as_slurm_does(days: int, hours: int, minutes: int, seconds: int) -> None:
    clock = f"{hours:02d}:{minutes:02d}:{seconds:02d}"
    expected = f"{days}-{clock}" if days else clock
    assert units.format_time(((days * 24 + hours) * 60 + minutes) * 60 + seconds) == expected


@given(st.text(max_size=12))
def test_any_text_is_a_time_or_a_usage_error(text: str) -> None:
    try:
        seconds = units.parse_time(text)
    except UsageError:
        return
    assert seconds is None or seconds >= 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("90 s", 90),
        ("10min", 600),
        ("1h30min", 5400),
        ("1h 30min 5s", 5405),
        ("0.5h", 1800),
        ("7d", 7 * 86400),
        ("2W", 14 * 86400),
        ("15sec", 15),
    ],
)
def test_reads_durations(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "90", "s", "10m", "6M", "1y", "-5s", "5s,", "1:30", "1h30", "1e3s", "٣s", "0s", "5000w 5000w", "5 min x"],
)
def test_refuses_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        units.parse_duration(text)
    assert repr(text) in caught.value.what
    assert caught.value.fix


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("1", 1),
        ("512G", 512 * 1024),
        ("512gb", 512 * 1024),
        ("2T", 2 * 1024**2),
        ("2048K", 2),
        ("7M", 7),
        ("1GiB", 1024),
    ],
)
def test_reads_memory_in_mib(text: str, mib: int) -> None:
    assert units.parse_memory_mib(text) == mib


@pytest.mark.parametrize("text", ["", "G", "1.5G", "-1", "1P", "1 2", "12X", "٣"])
def test_refuses_what_is_no_memory(text: str) -> None:
    with pytest.raises(UsageError, match="not a Slurm size"):
        units.parse_memory_mib(text)


@given(numbers, st.sampled_from("MGT"))
def test_memory_units_are_powers_of_1024(count: int, unit: str) -> None:
    assert units.parse_memory_mib(f"{count}{unit}") == count * 1024 ** "MGT".index(unit)


@pytest.mark.parametrize(
    ("text", "name", "seconds", "batch_only"),
    [
        ("USR1", "USR1", 60, False),
        ("B:USR1@300", "USR1", 300, True),
        ("B:SIGUSR2", "USR2", 60, True),
        ("R:TERM@10", "TERM", 10, False),
        ("RB:10@0", "USR1", 0, True),
        ("15", "TERM", 60, False),
        ("b:usr1@5", None, 0, False),
        ("usr1", "USR1", 60, False),
    ],
)
def test_reads_signals(text: str, name: str | None, seconds: int, batch_only: bool) -> None:
    if name is None:  # sbatch takes the letters before the colon in capitals only
        with pytest.raises(UsageError):
            units.parse_signal(text)
        return
    assert units.parse_signal(text) == units.SignalOption(name=name, seconds=seconds, batch_only=batch_only)


@pytest.mark.parametrize(
    "text", ["", "B:", "NOSUCH", "USR1@", "USR1@-1", "X:USR1", "USR1@65536", "999", "@60", "B:USR1@5@6"]
)
def test_refuses_what_is_no_signal(text: str) -> None:
    with pytest.raises(UsageError):
        units.parse_signal(text)


@given(st.sampled_from(sorted(signal.Signals)), st.integers(0, 65535))
def test_signal_numbers_and_names_are_the_same(number: signal.Signals, seconds: int) -> None:
    assume(number.name not in {"SIGRTMIN", "SIGRTMAX"})
    by_number, by_name = (units.parse_signal(f"B:{spelled}@{seconds}") for spelled in (int(number), number.name))
    assert by_number == by_name


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (5 * 2**40, "5.0 TiB"), (-2048, "-2.0 KiB")],
)
def test_writes_bytes(count: float, text: str) -> None:
    assert units.format_bytes(count) == text


@given(st.floats(min_value=0, max_value=1e16))
def test_written_bytes_are_within_rounding(count: float) -> None:
    number, unit = units.format_bytes(count).split()
    factor = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert abs(float(number) * factor - count) <= max(0.51, 0.051 * factor)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.25, "4.2 s"),
        (59.9, "59.9 s"),
        (59.97, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (185, "3 min 05 s"),
        (7620, "2 h 07 min"),
        (360000, "100 h 00 min"),
    ],
)
def test_writes_durations(seconds: float, text: str) -> None:
    assert units.format_duration(seconds) == text


@given(st.floats(min_value=0, max_value=1e7))
def test_written_durations_never_show_sixty(seconds: float) -> None:
    text = units.format_duration(seconds)
    assert not re.search(r"\b60(\.0)? (s|min)", text)
