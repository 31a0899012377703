"""Fused operations of decoding: for each a torch reference and a Triton kernel that equals it."""
