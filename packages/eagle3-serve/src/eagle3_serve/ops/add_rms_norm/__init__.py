"""The residual add with the RMSNorm that follows it; without a residual, the RMSNorm alone."""
