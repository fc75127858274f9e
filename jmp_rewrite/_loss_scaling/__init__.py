"""Loss scaling as an optax transformation."""
