"""Frozen values only."""
