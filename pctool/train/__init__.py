"""What a training script imports: `Run` and `ResumableSampler`."""

from pctool.train.run import Run
from pctool.train.sampler import ResumableSampler

__all__ = ["ResumableSampler", "Run"]
