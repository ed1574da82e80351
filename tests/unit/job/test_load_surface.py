"""The public surface of a job: names people write in files, in Python and on the command line. Only ever added to."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path

import pctool
from pctool.cli import render, submit
from pctool.job.keys import CHECKPOINT_KEYS, JOB_KEYS
from pctool.spec.job import JobSpec

DOCS = Path(__file__).parents[3] / "docs" / "jobs.md"

FIELDS = """
name command run_dir nodes gpus_per_node ranks_per_node cpus_per_task mem partition time output requeue signal
constraint account qos exclusive array dependency chdir python template wait stop_signal max_stalled checkpoint_store
checkpoint_every checkpoint_keep checkpoint_keep_for checkpoint_keep_every checkpoint_mirror checkpoint_mirror_mbps
environment
"""

JOB_FLAGS = """
-J --job-name -N --nodes -p --partition -t --time --gpus-per-node --ranks-per-node -c --cpus-per-task --mem
-C --constraint -A --account -q --qos -a --array -d --dependency -D --chdir -o --output --signal --run-dir
--store --every --keep --keep-for --keep-every --max-stalled --stop-signal --srun-wait --python --template
--requeue --no-requeue --exclusive --env --het-group --cluster -h --help
"""


def flags(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}


def test_fields_and_exports() -> None:
    assert [field.name for field in fields(JobSpec)] == FIELDS.split()
    assert pctool.JobSpec is JobSpec
    assert callable(pctool.submit)


def test_flags() -> None:
    parsers = {"render": argparse.ArgumentParser(), "submit": argparse.ArgumentParser()}
    render.configure(parsers["render"])
    submit.configure(parsers["submit"])
    assert flags(parsers["render"]) == set(JOB_FLAGS.split())
    assert flags(parsers["submit"]) == {*JOB_FLAGS.split(), "--dry-run", "--parsable", "--json"}


def test_the_documented_table_has_every_key_and_flag() -> None:
    table = re.search(r"\| key \| flag .*?\n\n", DOCS.read_text(), re.DOTALL)
    assert table is not None
    rows = [row.split("|")[1:3] for row in table[0].strip().splitlines()[2:]]
    keys = {key for row in rows for key in re.findall(r"`([^`]+)`", row[0])}
    assert keys == {*JOB_KEYS, *(f"checkpoint.{key}" for key in CHECKPOINT_KEYS), "environment.NAME"}
    documented = {flag for row in rows for flag in re.findall(r"`(--?\w[\w-]*)", row[1])}
    undocumented = {"--het-group", "--cluster", "-h", "--help"}
    short_rows = {"--account", "--qos"}  # their row names the short flags
    assert set(JOB_FLAGS.split()) - undocumented - short_rows == documented
