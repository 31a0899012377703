"""Serves a target model with an EAGLE-3 draft, losslessly, behind an OpenAI-compatible API."""
