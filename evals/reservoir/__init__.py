"""Reservoir sampling (Pan et al. 2024)."""
