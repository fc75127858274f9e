"""Makes the program with explicit casts."""
