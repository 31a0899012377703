"""The weights and the batch that every system of benchmarks/train_step.py is given."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

STEP_WEIGHT = 0.8
EPS = 1e-5
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Case:
    """One document of S tokens, its states, and one-layer draft weights under canonical names."""

    sizes: dict[str, int]  # of the draft and both vocabularies
    ttt_length: int
    dtype: torch.dtype
    device: torch.device
    weights: dict[str, Tensor]  # draft, float32
    head: Tensor  # [V,H] of the target
    ids: Tensor  # [S]
    loss_mask: Tensor  # [S] bool
    aux: Tensor  # [S,3H]
    final: Tensor  # [S,H] after a final norm of unit weight
    argmax: Tensor  # [S]
    logz: Tensor  # [S]

    @classmethod
    def load(cls, folder: Path, settings: dict[str, Any]) -> "Case":
        """Read what `benchmarks/train_step.py` wrote."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        loaded = load_file(folder / "case.safetensors", device=str(device))
        # Held in memory before anything is measured, not read from the file when first touched.
        tensors = {name: tensor.clone() for name, tensor in loaded.items()}
        weights = {n[6:]: tensors.pop(n) for n in list(tensors) if n.startswith("draft.")}
        return cls(
            sizes=settings["sizes"],
            ttt_length=settings["ttt_length"],
            dtype=getattr(torch, settings["dtype"]),
            device=device,
            weights=weights,
            **tensors,
        )

    def autocast(self) -> torch.autocast:
        """Where matrix products run in a lower precision than float32."""
        half = self.dtype != torch.float32
        return torch.autocast(self.device.type, torch.bfloat16, enabled=half)
