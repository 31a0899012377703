"""What a supervised row is trained on: weighted sums of divergences and of the acceptance.

p is the target's law restricted to the draft's ids D and renormalised, m the mass that the whole
law has on D, q the draft's law. Tokens outside D are never drafted, so speculative sampling accepts
with probability a = sum over D of min(m p, q), and the total variation distance of q to the whole
law is 1 - a exactly.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# The paper's best eta (LK losses, arXiv 2602.23881).
_LK_DECAY = 3.0


@dataclass(frozen=True)
class Objective:
    """The weight of each term.

    soft_ce: -sum p log q. kl: the same less the teacher's entropy, so the same gradient.
    tv: 1 - a. lk_alpha: -log a. lk_lambda: w kl + (1 - w)(1 - a), w = exp(-3 a) held constant and
    taken row by row, so that a row's loss does not depend on what shares its batch (SpecForge takes
    one w for all rows of a step).
    """

    soft_ce: float = 0.0
    kl: float = 0.0
    tv: float = 0.0
    lk_alpha: float = 0.0
    lk_lambda: float = 0.0

    @property
    def needs_acceptance(self) -> bool:
        """Whether a enters the gradient."""
        return self.tv + self.lk_alpha + self.lk_lambda > 0

    def row(self, ce: Tensor, kl: Tensor, acceptance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N] each -> the loss, and how much of the gradients of kl and of 1 - a is its own."""
        if not self.needs_acceptance:
            value = self.soft_ce * ce + self.kl * kl
            return value, torch.full_like(ce, self.soft_ce + self.kl), torch.zeros_like(ce)
        miss = 1 - acceptance
        # Where nothing overlaps, the gradient of a vanishes with a, so the quotient stays finite.
        some = acceptance.clamp(min=torch.finfo(ce.dtype).tiny)
        share = torch.exp(-_LK_DECAY * acceptance)
        value = (
            self.soft_ce * ce
            + self.kl * kl
            + self.tv * miss
            - self.lk_alpha * some.log()
            + self.lk_lambda * (share * kl + (1 - share) * miss)
        )
        divergence = self.soft_ce + self.kl + self.lk_lambda * share
        return value, divergence, self.tv + self.lk_alpha / some + self.lk_lambda * (1 - share)


SOFT_CE = Objective(soft_ce=1.0)
