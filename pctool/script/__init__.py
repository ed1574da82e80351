"""Batch scripts people have: which of their lines sbatch obeys, and what it reads there."""
