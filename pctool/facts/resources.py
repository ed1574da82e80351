"""Find the files that come with pctool: templates, cluster configs, bootstrap scripts, examples.

In a checkout they lie at its top; in an installed wheel under `pctool/_data/` with the same relative paths.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from pctool.errors import NotFoundError

FOLDERS = ("sbatch-templates", "cluster-configs", "bootstrap", "docs/examples")


def data_root() -> Path:
    """Return the folder that holds FOLDERS: `pctool/_data` where that exists, else the checkout."""
    package = Path(str(files("pctool")))
    installed = package / "_data"
    return installed if installed.is_dir() else package.parent


def resource(name: str) -> Path:
    """Return the path of a file or folder by its path in the repository, such as sbatch-templates/torchrun.sbatch.j2.

    Raises NotFoundError if this installation does not carry it.
    """
    path = data_root() / name
    if not path.exists():
        raise NotFoundError(
            f"{name} does not come with this installation of pctool",
            where=str(path),
            fix="install pctool again; if that does not help, report it",
        )
    return path
