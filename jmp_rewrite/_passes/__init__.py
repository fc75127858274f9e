"""Helps single compilers to make the most of a rewritten program."""
