"""What a layer that sees embeddings takes in: gather, two norms and the concatenation."""
