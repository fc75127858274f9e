"""Serving a model: weights and caches that are stored in half."""

from jmp_rewrite._inference.inference import for_inference

__all__ = [
    "for_inference",
]
