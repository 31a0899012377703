"""Which weights train, and the optimisers that move them."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from eagle3_core import Eagle3Draft
from eagle3_train.config import FitConfig

Place = Callable[[Tensor, Tensor], Tensor]  # a whole value, its parameter -> as it is held here


def trainable(draft: Eagle3Draft, fit: FitConfig) -> list[nn.Parameter]:
    """Mark which parameters train; returns them."""
    draft.requires_grad_(True)
    draft.embed_tokens.requires_grad_(fit.train_embeddings)
    draft.lm_head.requires_grad_(fit.train_head)
    return [p for p in draft.parameters() if p.requires_grad]


class DraftOptimizer:
    """AdamW for everything, or torch's Muon for the matrices inside the network and AdamW for
    embeddings, head and norms. Norms and biases do not decay.

    `fit.learning_rate` serves both: Muon's update is scaled to the size AdamW's has.
    """

    def __init__(self, draft: Eagle3Draft, fit: FitConfig) -> None:
        """Over the parameters of `draft` that require gradients."""
        self._names: dict[Tensor, str] = {
            p: n for n, p in draft.named_parameters() if p.requires_grad
        }
        hidden, wide, narrow = [], [], []
        outer = {draft.embed_tokens.weight, draft.lm_head.weight}
        for p in self._names:
            inner = fit.optimizer == "muon" and p.dim() == 2 and p not in outer
            (hidden if inner else wide if p.dim() > 1 else narrow).append(p)
        groups = [
            {"params": wide, "weight_decay": fit.weight_decay},
            {"params": narrow, "weight_decay": 0.0},
        ]
        first, second = fit.betas
        # DeepSpeed refuses empty groups.
        groups = [group for group in groups if group["params"]]
        self.adamw = torch.optim.AdamW(groups, fit.learning_rate, (first, second), fused=True)
        self._all: list[torch.optim.Optimizer] = [self.adamw]
        if hidden:
            self._all.append(
                torch.optim.Muon(
                    hidden,
                    lr=fit.learning_rate,
                    weight_decay=fit.weight_decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )

    def step(self, rate: float) -> None:
        """Move the weights at learning rate `rate`."""
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self._names:
            parameter.grad = None

    def moments(self) -> dict[str, Tensor]:
        """State of every parameter as it is held here: "kind/parameter" -> values."""
        return {
            f"{kind}/{self._names[parameter]}": value
            for optimizer in self._all
            for parameter, state in optimizer.state.items()
            for kind, value in state.items()
        }

    def restore(self, moments: Mapping[str, Tensor], place: Place) -> None:
        """Set whole moments, laid out as `place` does; a step count is a plain number."""
        owners = {
            self._names[p]: (optimizer, p)
            for optimizer in self._all
            for group in optimizer.param_groups
            for p in group["params"]
        }
        for key, value in moments.items():
            kind, name = key.split("/", 1)
            optimizer, parameter = owners[name]
            optimizer.state[parameter][kind] = (
                value.to(parameter.device) if kind == "step" else place(value, parameter)
            )
