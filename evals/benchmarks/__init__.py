"""Benchmarks: speed of jaxkv and of its peers, run by hand on an idle machine."""
