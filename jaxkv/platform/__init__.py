"""Forms of one backend, each with what the backend does without it and where it was measured."""
