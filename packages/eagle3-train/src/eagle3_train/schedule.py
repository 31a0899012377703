"""The learning rate and the length of the unroll over a run."""

import math

from eagle3_train.config import FitConfig


def learning_rate_factor(fit: FitConfig, progress: float) -> float:
    """Share of the peak learning rate at `progress` in [0, 1] of the run."""
    if progress < fit.warmup_ratio:
        return progress / fit.warmup_ratio
    done = (progress - fit.warmup_ratio) / max(1 - fit.warmup_ratio, 1e-9)
    if fit.schedule == "wsd":
        return min(1.0, (1 - progress) / fit.decay_ratio) if fit.decay_ratio else 1.0
    if fit.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return 1.0 if fit.schedule == "constant" else max(0.0, 1 - done)


def unroll_length(fit: FitConfig, progress: float) -> int:
    """Steps of the unroll at `progress` in [0, 1] of the run: every length for equally long."""
    ramp = fit.ttt_ramp
    if ramp is None or progress >= ramp.share:
        return fit.ttt_length
    return ramp.start + int((fit.ttt_length - ramp.start) * progress / ramp.share)
