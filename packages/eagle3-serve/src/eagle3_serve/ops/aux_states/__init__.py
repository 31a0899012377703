"""The target's states at the draft's boundaries, side by side and normed, as fc takes them."""
