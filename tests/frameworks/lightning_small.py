"""A small module from scratch, its data and its Trainer, for the tests and their script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

SAMPLES: Any = [torch.sin(torch.arange(8.0) + index) for index in range(50)]


class Small(LightningModule):  # type: ignore[misc]
    """It notes each step's loss; dropout is on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 8))
        self.losses: dict[tuple[int, int], tuple[float, float]] = {}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = ((self.net(batch) - batch) ** 2).mean()
        self.losses[self.trainer.current_epoch, batch_idx] = (loss.item(), batch.sum().item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", ((self.net(batch) - batch) ** 2).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)  # which makes the loader before anything is restored
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class AtStep(Callback):  # type: ignore[misc]
    """Do something after one step."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self.step, self.action = step, action

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            self.action()


def make_trainer(folder: Path, *callbacks: Callback, **options: Any) -> Any:
    """Return a Trainer; 13 batches of 4 make 7 optimizer steps an epoch, 21 in all."""
    defaults: dict[str, Any] = {
        "max_epochs": 3,
        "accumulate_grad_batches": 2,
        "val_check_interval": 4,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "default_root_dir": folder,
    }
    return Trainer(callbacks=list(callbacks), **{**defaults, **options})


def fit(trainer: Any, *, workers: int = 0, loader: Any = None) -> Small:
    """Fit a fresh module and return it."""
    seed_everything(1, verbose=False)
    model = Small()
    data = loader if loader is not None else DataLoader(SAMPLES, 4, shuffle=True, num_workers=workers)
    trainer.fit(model, data, DataLoader(SAMPLES[:8], 4))
    return model


def same(model: Small, other: Small) -> bool:
    """Return whether two modules have the same weights, to the bit."""
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(one, two) for one, two in pairs)
