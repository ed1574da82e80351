"""The docs cannot rot: links resolve, every page is found from the index, commands name verbs and flags that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from pctool.cli.main import VERBS, parser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_SHELL = re.compile(r"^```(?:sh|bash|console|shell)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(pctool [^`\n]+)`")


def links(page: Path) -> Iterator[str]:
    """Return the relative links of a page, code blocks left out."""
    for target in _LINK.findall(_FENCE.sub("", page.read_text())):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as repository hosts make them."""
    headings = re.findall(r"^#+ +(.+?) *$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> Iterator[list[str]]:
    """Return the words of every `pctool VERB ...` in a page's shell blocks and inline code."""
    text = page.read_text()
    lines = [line for block in _SHELL.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *_INLINE.findall(text)]:
        for piece in re.findall(r"(?:^|[\s(;&|])(pctool [^;&|)]+)", line.split(" #")[0]):
            yield shlex.split(piece.replace("...", ""))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), f"{target} leads nowhere"
        assert goal.is_relative_to(ROOT)
        if anchor and goal.suffix == ".md":
            assert anchor in anchors(goal), f"{goal.name} has no heading for #{anchor}"


def test_every_page_is_linked_from_the_index() -> None:
    index = DOCS / "index.md"
    linked = {(DOCS / target.partition("#")[0]).resolve() for target in links(index)}
    pages = {page for page in DOCS.rglob("*.md") if page != index and "examples" not in page.parts}
    assert pages <= linked, f"not linked from docs/index.md: {sorted(page.name for page in pages - linked)}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_name_verbs_that_exist(page: Path) -> None:
    for words in commands(page):
        verb = words[1] if len(words) > 1 else "--help"
        assert verb in VERBS or verb in {"--help", "--version", "VERB"}, f"{page.name}: {shlex.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_use_flags_that_exist(page: Path) -> None:
    for words in commands(page):
        if len(words) < 2 or words[1] not in VERBS:
            continue
        own = words[2 : words.index("--")] if "--" in words else words[2:]
        known = _known_flags(words[1])
        for word in own:
            if re.match(r"--?[a-zA-Z]", word):
                assert word.split("=")[0] in known, f"{page.name}: {shlex.join(words)}"


def _known_flags(verb: str) -> set[str]:
    flags: set[str] = set()
    waiting = [parser(verb)]
    while waiting:
        for action in waiting.pop()._actions:
            flags.update(action.option_strings)
            if isinstance(action.choices, dict):  # the parsers of sub-verbs
                waiting.extend(action.choices.values())
    return flags


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_named_in_commands_exist(page: Path) -> None:
    """Paths into the repository (`bootstrap/try.sh`, `cluster-configs/p5-spot.yaml`) that a page shows are there."""
    folders = r"(?:bootstrap|cluster-configs|sbatch-templates|docs/examples)"
    for name in re.findall(rf"\b({folders}/[\w./-]*\w)", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_the_verbs_examples_use_flags_that_exist() -> None:
    for name, verb in VERBS.items():
        words = shlex.split(verb.example.replace('eval "$(', "").replace(')"', ""))
        start = words.index("pctool")
        assert words[start + 1] == name
        own = words[start + 2 :]
        own = own[: own.index("--")] if "--" in own else own
        assert {word for word in own if word.startswith("-")} <= _known_flags(name)


def test_the_license_is_whole() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_no_page_names_a_machine_or_a_host_to_download_from() -> None:
    for page in PAGES:
        named = re.findall(r"https?://(?!169\.254\.169\.254|127\.0\.0\.1|localhost)\S+|/root/\S*", page.read_text())
        assert not named, page.name
