"""Trains EAGLE-3 drafts by distillation from a target model's hidden states."""
