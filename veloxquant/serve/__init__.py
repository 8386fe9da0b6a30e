"""Hooks for inference servers and library users: planned caches put on a loaded model."""
