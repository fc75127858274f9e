"""Finds the line that loses precision."""
