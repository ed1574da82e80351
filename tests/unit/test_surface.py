"""The public surface: names, verbs, flags and exit codes. What is in tests/golden/surface.json is a promise.

After a change that is meant: `pytest tests/unit/test_surface.py --rewrite-golden`.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pctool
from pctool import errors
from pctool.cli.main import VERBS, parser
from pctool.run import env, ledger, records

PACKAGE = Path(pctool.__file__).parent


def exported_names() -> dict[str, list[str]]:
    """Return `__all__` of every package that declares one, and of the callbacks, without importing any."""
    names = {}
    frameworks = [PACKAGE / "train" / "hf.py", PACKAGE / "train" / "lightning.py"]
    for path in sorted([*PACKAGE.rglob("__init__.py"), *frameworks]):
        module = path.parent if path.stem == "__init__" else path.with_suffix("")
        package = ".".join(["pctool", *module.relative_to(PACKAGE).parts])
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names[package] = sorted(ast.literal_eval(node.value))
    return names


def arguments(made: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the flags and positionals of a parser, and those of its sub-verbs."""
    surface: dict[str, Any] = {"flags": sorted(_flags(made)), "positionals": list(_positionals(made))}
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            surface["verbs"] = {name: arguments(sub) for name, sub in sorted(action.choices.items())}
    return surface


def _flags(made: argparse.ArgumentParser) -> Iterator[str]:
    for action in made._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
            yield "/".join(action.option_strings) + value


def _positionals(made: argparse.ArgumentParser) -> Iterator[str]:
    for action in made._actions:
        if not action.option_strings and not isinstance(action, argparse._SubParsersAction):
            yield f"{action.metavar or action.dest}{'' if action.nargs is None else f' ({action.nargs})'}"


def exit_codes() -> dict[str, int]:
    """Return the exit code that each class of errors owns, and the codes that Slurm reads."""
    classes = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    codes = {name: value.exit_code for name, value in classes.items() if issubclass(value, errors.PctoolError)}
    return {**codes, "INTERRUPTED": errors.INTERRUPTED, "REQUEUE": errors.REQUEUE, "HOLD": errors.HOLD}


def surface() -> dict[str, Any]:
    return {
        "names": exported_names(),
        "verbs": {name: arguments(parser(name)) for name in VERBS},
        "exit codes": exit_codes(),
        "environment": {name: value for name, value in sorted(vars(env).items()) if name.isupper()},
        "ledger events": sorted(ledger.EVENTS),
        "causes": list(records.CAUSES),
    }


def test_the_public_surface_is_what_it_was(golden: Callable[[str, str], None]) -> None:
    golden("surface.json", json.dumps(surface(), indent=2) + "\n")


def test_every_exported_name_is_there() -> None:
    for name in exported_names()["pctool"]:
        assert getattr(pctool, name)


def test_every_verb_has_a_module_of_its_own_name() -> None:
    assert {name: verb.module for name, verb in VERBS.items()} == {name: f"pctool.cli.{name}" for name in VERBS}
