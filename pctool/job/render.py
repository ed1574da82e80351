"""Render the batch script of a job from a template; the one place that knows jinja2 and sbatch's quoting."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pctool.errors import UsageError
from pctool.facts.resources import resource
from pctool.job.array import task_run_dir
from pctool.job.check import heterogeneous
from pctool.run import env
from pctool.slurm.comment import format_comment
from pctool.spec.job import JobSpec
from pctool.units import parse_signal

TEMPLATE = "sbatch-templates/torchrun.sbatch.j2"
MAX_SCRIPT_BYTES = 4 * 1024 * 1024  # slurmctld refuses larger ones (MAX_BATCH_SCRIPT_SIZE)
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./&|*\[\]-]+")
_HETEROGENEOUS = re.compile(r"(?:hetjob|packjob)\b|.*--(?:het|pack)-group\b", re.IGNORECASE)


def sbatch_quote(value: object) -> str:
    """Quote a value for an #SBATCH line, where sbatch splits at blanks, `#` begins a comment and nothing expands.

    In double quotes only the quote and the backslash need a backslash. Source: sbatch 22.05 to 26.05, tried.
    Raises UsageError for a line break, which no quoting carries.
    """
    text = str(value)
    if any(character in text for character in "\n\r\0"):
        raise UsageError(f"{text!r} cannot be a value of sbatch", fix="write it on one line")
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def sh_words(words: Iterable[object]) -> str:
    """Quote words for the shell and join them."""
    return " ".join(shlex.quote(str(word)) for word in words)


def render_script(spec: JobSpec, *, interpreter: str) -> str:
    """Return the batch script of a job. `interpreter` is the absolute path of the Python that runs pctool.

    Raises UsageError, with file and line, for a template that cannot be read or rendered, and for a script that sbatch
    would not take.
    """
    path = Path(spec.template) if spec.template else resource(TEMPLATE)
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read the template: {why}", where=str(path), fix="correct `template`") from None
    script = _render(source, context_of(spec, interpreter=interpreter), str(path))
    _check_script_text(script, str(path))
    return script


def context_of(spec: JobSpec, *, interpreter: str) -> dict[str, Any]:
    """Return the values a template may use: `job` (the spec's fields) and those derived from it."""
    return {
        "job": spec,
        "comment": format_comment(run_dir_pattern(spec)),
        "output": output_pattern(spec),
        "environment": {**spec.environment, **_exports(spec)},
        "interpreter": interpreter,
        "signal": parse_signal(spec.signal).name,
        "launch": launch_words(spec),
    }


def output_pattern(spec: JobSpec) -> str:
    """Return the value of --output: the spec's, or one file a job (a task of an array) in the run's log folder."""
    return spec.output or f"{spec.run_dir}/logs/slurm-{'%A_%a' if spec.array else '%j'}.out"


def run_dir_pattern(spec: JobSpec) -> str:
    """Return the run directory, with %a for the task where the job is an array."""
    return str(task_run_dir(spec.run_dir, "%a")) if spec.array else spec.run_dir


def launch_words(spec: JobSpec) -> tuple[str, ...]:
    """Return the arguments of `pctool launch`."""
    words = ["--nproc-per-node", str(spec.nproc_per_node)]
    if spec.stop_signal:
        words += ["--stop-signal", spec.stop_signal]
    if spec.python:
        words += ["--python", spec.python]
    return (*words, "--", *spec.command)


def _exports(spec: JobSpec) -> dict[str, str]:
    values = {
        env.STORE: spec.checkpoint_store,
        env.EVERY: spec.checkpoint_every,
        env.KEEP: spec.checkpoint_keep,
        env.KEEP_FOR: spec.checkpoint_keep_for,
        env.KEEP_EVERY: spec.checkpoint_keep_every,
        env.MIRROR: spec.checkpoint_mirror,
        env.MIRROR_MBPS: spec.checkpoint_mirror_mbps,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _render(source: str, context: Mapping[str, Any], where: str) -> str:
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # shell, not HTML: the filters quote
    )
    environment.filters.update(sh=shlex_quote, sh_words=sh_words, sbatch=sbatch_quote)
    try:
        return environment.from_string(source).render(context)
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"template: {error.message}", where=f"{where}:{error.lineno}", fix=_HELP) from None
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:  # also what Python says of a value
        raise UsageError(f"template: {error}", where=_line(where, error), fix=_HELP) from None


_HELP = "docs/jobs.md lists the names and filters that a template can use"


def shlex_quote(value: object) -> str:
    """Quote one word for the shell."""
    return shlex.quote(str(value))


def _line(where: str, error: Exception) -> str:
    """Return where:line of the template's line that failed, from the traceback's frame inside it."""
    line = None
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    return f"{where}:{line}" if line else where


def _check_script_text(script: str, where: str) -> None:
    problem = None
    if not script.startswith("#!"):
        problem = "the rendered script does not begin with #!, so sbatch refuses it"
    elif len(script.encode()) > MAX_SCRIPT_BYTES:
        problem = f"the rendered script is larger than {MAX_SCRIPT_BYTES} bytes, so slurmctld refuses it"
    if problem:
        raise UsageError(problem, where=where, fix="correct the template")
    for line in script.splitlines():
        if line.startswith("#SBATCH") and _HETEROGENEOUS.match(line.removeprefix("#SBATCH").strip()):
            raise heterogeneous(where)
