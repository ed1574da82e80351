"""Checkpoints: manifest, completeness, stores, save and restore, mirror."""
