"""The stages of a run. Each reads what the one before left under OUT and skips what is finished."""
