"""A YAML document that knows where each value stands, so that errors can name file, line and path.

PyYAML reads it as ParallelCluster does: YAML 1.1, safe types only, duplicate keys refused. libyaml is used where
PyYAML was built with it (a 50-queue config: 11 ms against 120 ms).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pctool.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    import yaml

_SEXAGESIMAL = re.compile(r"^[-+]?\d+(:[0-5]?\d)+(\.\d*)?$")

_WANTED = "give the YAML file that `pcluster create-cluster` takes"


@dataclass(frozen=True)
class Value:
    """One value of the document: what it is, its path from the top (`Scheduling/SlurmQueues/0/Name`), its line."""

    file: str
    path: str
    line: int  # from 1
    data: Any  # scalar, dict[str, Value] or list[Value]
    raw: str = ""  # a scalar as written
    quoted: bool = False

    def fail(self, what: str, *, fix: str | None = None) -> NoReturn:
        """Raise UsageError about this value, naming file, line and path."""
        raise UsageError(f"{self.path or 'the document'}: {what}", where=f"{self.file}:{self.line}", fix=fix)

    def get(self, key: str) -> Value | None:
        """Return the value of `key` in this mapping; None where it is missing or null."""
        found = self.mapping().get(key)
        return None if found is None or found.data is None else found

    def require(self, key: str) -> Value:
        """Return the value of `key` in this mapping; raise UsageError naming the missing path."""
        found = self.get(key)
        if found is None:
            missing = f"{self.path}/{key}" if self.path else key
            raise UsageError(f"{missing} is missing", where=f"{self.file}:{self.line}", fix=f"add {key} there")
        return found

    def mapping(self) -> dict[str, Value]:
        """Return this value as a mapping."""
        if not isinstance(self.data, dict):
            self.fail(f"must be a mapping, is {_kind(self.data)}")
        return self.data

    def items(self) -> Iterator[Value]:
        """Yield the entries of this list."""
        if not isinstance(self.data, list):
            self.fail(f"must be a list, is {_kind(self.data)}")
        yield from self.data

    def text(self) -> str:
        """Return this value as a string; a number or boolean where a string belongs is refused."""
        if not isinstance(self.data, str):
            self.fail(f"must be a string, is {_kind(self.data)}", fix=f'write it quoted: "{self.raw}"')
        return self.data

    def integer(self, *, least: int = 0) -> int:
        """Return this value as a whole number of at least `least`; digits in a string count, as in ParallelCluster."""
        data = int(self.data) if isinstance(self.data, str) and self.data.lstrip("-").isdigit() else self.data
        if not isinstance(data, int) or isinstance(data, bool):
            self.fail(f"must be a whole number, is {self.raw or _kind(data)!r}")
        if data < least:
            self.fail(f"must be at least {least}, is {data}")
        return data

    def boolean(self) -> bool:
        """Return this value as true or false."""
        if isinstance(self.data, bool):
            return self.data
        if not isinstance(self.data, str) or self.data.lower() not in {"true", "false"}:
            self.fail(f"must be true or false, is {self.raw or _kind(self.data)!r}")
        return self.data.lower() == "true"

    def setting(self) -> str:
        """Return a Slurm setting's value as ParallelCluster writes it into slurm.conf.

        Refuses what YAML 1.1 silently turns into another value: an unquoted 24:00:00 is the number 86400, which Slurm
        would read as 60 days.
        """
        if isinstance(self.data, dict | list) or self.data is None:
            self.fail(f"must be one value, is {_kind(self.data)}")
        if not self.quoted and _SEXAGESIMAL.match(self.raw) and not isinstance(self.data, str):
            self.fail(f"{self.raw} without quotes is the number {self.data} in YAML", fix=f'write it as "{self.raw}"')
        text = str(self.data)
        if any(ord(char) < 32 for char in text):
            self.fail("must stand on one line")
        return text


def read_document(path: Path) -> Value:
    """Read one YAML file.

    Raises NotFoundError if there is no such file, UsageError for what is not YAML or has a key twice.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise NotFoundError("there is no such cluster config", where=str(path), fix="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"the cluster config cannot be read: {said}", where=str(path), fix=_WANTED) from None
    loader_class = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        loader = loader_class(text)
        node = loader.get_single_node()
        if node is None:
            raise UsageError("the cluster config is empty", where=str(path), fix=_WANTED)
        return _Walk(str(path), loader).value(node, "")
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"not valid YAML: {error.problem}", where=f"{path}:{line}", fix=_WANTED) from None
    except yaml.YAMLError as error:
        raise UsageError(f"not valid YAML: {error}", where=str(path), fix=_WANTED) from None


class _Walk:
    """Turns YAML nodes into Values; scalars by PyYAML's own safe constructor."""

    def __init__(self, file: str, loader: yaml.SafeLoader) -> None:
        self.file = file
        self.loader = loader
        self.open: set[int] = set()  # nodes being walked: an alias to one of them would never end

    def value(self, node: yaml.Node, path: str) -> Value:
        import yaml

        line = node.start_mark.line + 1
        if id(node) in self.open:
            raise UsageError(f"{path}: an alias that contains itself", where=f"{self.file}:{line}")
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return Value(self.file, path, line, self._mapping(node, path))
            if isinstance(node, yaml.SequenceNode):
                entries = [self.value(child, f"{path}/{at}".lstrip("/")) for at, child in enumerate(node.value)]
                return Value(self.file, path, line, entries)
            return self._scalar(node, path, line)
        finally:
            self.open.discard(id(node))

    def _scalar(self, node: yaml.Node, path: str, line: int) -> Value:
        try:
            data = self.loader.construct_object(node)
        except ValueError as error:
            raise UsageError(f"{path}: {node.value!r}: {error}", where=f"{self.file}:{line}") from None
        return Value(self.file, path, line, data, str(node.value), getattr(node, "style", None) in {"'", '"'})

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Value]:
        self._refuse_duplicates(node, path)
        self.loader.flatten_mapping(node)
        found: dict[str, Value] = {}
        for key, child in node.value:
            name = str(key.value)
            found[name] = self.value(child, f"{path}/{name}".lstrip("/"))
        return found

    def _refuse_duplicates(self, node: yaml.MappingNode, path: str) -> None:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in seen:
                what = f"{path + '/' if path else ''}{name} is there twice, first on line {seen[name]}"
                raise UsageError(what, where=f"{self.file}:{line}", fix="keep one of them")
            seen[name] = line


def _kind(data: object) -> str:
    names = {dict: "a mapping", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(data), "nothing" if data is None else type(data).__name__)
