"""A tiny GPT-2 from scratch, its data and its Trainer, for the tests and their script."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

VOCABULARY = 64


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Samples made from their index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, VOCABULARY, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class AtStep(TrainerCallback):  # type: ignore[misc]
    """Do something at the end of one step."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.action()


def make_trainer(folder: Path, **options: Any) -> Any:
    """Return a Trainer; 13 batches of 4 make 7 optimizer steps an epoch, 21 in all. Its dropout is on."""
    set_seed(3)
    shape = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **shape))
    defaults: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "save_strategy": "no",
        "include_num_input_tokens_seen": "all",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    }
    arguments = TrainingArguments(**{**defaults, **options})
    return Trainer(model=model, args=arguments, train_dataset=Texts(50), eval_dataset=Texts(6))


def told(trainer: Any) -> dict[int, list[Any]]:
    """Return what was logged of each step."""
    names = ("loss", "grad_norm", "learning_rate", "epoch", "num_input_tokens_seen")
    return {line["step"]: [line.get(name) for name in names] for line in trainer.state.log_history if "loss" in line}


def weights(trainer: Any) -> list[torch.Tensor]:
    """Return the weights."""
    return list(trainer.model.state_dict().values())
