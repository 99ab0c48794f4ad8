"""Caches of this package in the decoders of other libraries: `jaxkv.adapters.tunix`."""
