"""Serving: the engine, its prefix cache, and the HTTP server. Start at engine/engine.py."""
