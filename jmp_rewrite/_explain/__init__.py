"""Says what mixed precision does to a function."""
