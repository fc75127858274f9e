"""Which primitive runs in which precision: data."""
