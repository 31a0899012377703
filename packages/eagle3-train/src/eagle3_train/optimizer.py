"""Which weights train, and the optimiser that moves them."""

import torch

from eagle3_core import Eagle3Draft
from eagle3_train.config import FitConfig


def make_optimizer(draft: Eagle3Draft, fit: FitConfig) -> torch.optim.AdamW:
    """AdamW over what trains; norms and biases do not decay."""
    draft.requires_grad_(True)
    draft.embed_tokens.requires_grad_(fit.train_embeddings)
    draft.lm_head.requires_grad_(fit.train_head)
    trained = [p for p in draft.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": fit.weight_decay},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    first, second = fit.betas
    return torch.optim.AdamW(groups, lr=fit.learning_rate, betas=(first, second), fused=True)
