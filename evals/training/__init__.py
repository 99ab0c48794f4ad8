"""Models trained here, with and without sinks."""
