"""Run a job for real on a private Slurm while faults are injected, and judge what came of it."""
