"""Serving a model: weights and caches that are stored in half."""
