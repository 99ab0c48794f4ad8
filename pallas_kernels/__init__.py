"""Pallas kernels, a folder each, beside the XLA reference that defines what they compute."""
