"""silu(gate) * up over the two halves of one projection."""
