"""Decides which values are float32, which are half, and where one is rounded."""
