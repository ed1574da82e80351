"""Each example in docs/frameworks.md runs, and does nothing when it is started again."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
for _framework in ("transformers", "lightning", "accelerate"):
    pytest.importorskip(_framework)

import torch.distributed as dist  # noqa: E402
from framework_harness import Attempts, free_port  # noqa: E402

from pctool.errors import UsageError  # noqa: E402

os.environ["HF_HUB_OFFLINE"] = "1"

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
_SECTIONS = [part.partition("\n") for part in PAGE.read_text().split("\n## ")]
EXAMPLES = {name: found[1] for name, _, text in _SECTIONS if (found := re.search(r"```python\n(.*?)```", text, re.S))}


def test_there_is_an_example_of_each() -> None:
    assert list(EXAMPLES) == ["Hugging Face Trainer", "Lightning", "accelerate", "A loop of your own with FSDP2"]


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be the only rank that torchrun started, and leave no process group behind."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_is_done(
    name: str, tmp_path: Path, attempts: Attempts, monkeypatch: pytest.MonkeyPatch, one_rank: None
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        if "init_process_group" in EXAMPLES[name]:
            monkeypatch.setenv("MASTER_PORT", str(free_port()))
            for variable, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
                monkeypatch.setenv(variable, value)
        exec(compile(EXAMPLES[name], name, "exec"), {"__name__": "__main__"})
        if dist.is_initialized():
            dist.destroy_process_group()
    assert len(attempts.events("resumed")) == len(attempts.events("first-step")) == 1


@pytest.mark.parametrize(("module", "framework"), [("hf", "transformers"), ("lightning", "lightning")])
def test_a_framework_that_is_not_there_is_told(module: str, framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == framework]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, framework, None)
    monkeypatch.delitem(sys.modules, f"pctool.train.{module}", raising=False)
    with pytest.raises(UsageError, match=framework) as told:
        importlib.import_module(f"pctool.train.{module}")
    assert told.value.fix == f"pip install 'pctool[{module}]'"
