"""The one door to Slurm: commands as argv, pure parsers, and the private cluster."""
