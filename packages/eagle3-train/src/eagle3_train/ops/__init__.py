"""The two ops that training time goes into; each folder holds a torch reference."""
