"""The build step that puts the folders a pip installation needs into the wheel and the sdist.

Templates, cluster configs, bootstrap scripts and examples live at the top of the checkout, where people look for
them. In the wheel they lie under `pctool/_data/` with the same relative paths. pyproject.toml names `BuildPy` as the
`build_py` command; an editable installation needs nothing, since it finds the checkout.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from setuptools.command.build_py import build_py

FOLDERS = ("sbatch-templates", "cluster-configs", "bootstrap", "docs/examples")
TARGET = "pctool/_data"
_SKIPPED_SUFFIXES = {".pyc", ".pyo", ".swp", ".orig", ".rej"}


class BuildPy(build_py):
    """Copy FOLDERS into the built package and name them as sources, so that the sdist carries them too."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for source in _sources():
            target = self._target(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)  # with its mode: the scripts stay executable

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = list(super().get_outputs(include_bytecode))
        return outputs if self.editable_mode else [*outputs, *(str(self._target(source)) for source in _sources())]

    def get_source_files(self) -> list[str]:
        modules: list[str] = super().get_source_files()  # type: ignore[no-untyped-call]  # setuptools leaves it bare
        return [*modules, *(str(source) for source in _sources()), "CHANGELOG.md"]

    def _target(self, source: Path) -> Path:
        return Path(self.build_lib, TARGET, source)


def _sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file() and not _is_litter(path):
                yield path


def _is_litter(path: Path) -> bool:
    hidden = any(part.startswith(".") or part == "__pycache__" for part in path.parts)
    return hidden or path.suffix in _SKIPPED_SUFFIXES or path.name.endswith("~")
