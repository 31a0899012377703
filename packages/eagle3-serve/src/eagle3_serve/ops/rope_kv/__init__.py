"""Rotary positions of queries and keys, and the keys' and values' way into their slots."""
