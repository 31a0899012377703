"""The canonical EAGLE-3 draft: module, vocabulary map, acceptance laws and checkpoints."""

import importlib
from typing import TYPE_CHECKING, Any

from eagle3_core.attention import AttentionContext, CacheContext, UnrollContext
from eagle3_core.checkpoint import LoadedDraft, load_draft, save_draft
from eagle3_core.config import DraftConfig, default_aux_layer_ids
from eagle3_core.draft import Eagle3Draft, SplitEmbeddings
from eagle3_core.errors import UserError
from eagle3_core.ops import DraftOps, TorchOps

if TYPE_CHECKING:
    from eagle3_core.target import Target, capture_boundaries, capture_final, load_target

__all__ = [
    "AttentionContext",
    "CacheContext",
    "DraftConfig",
    "DraftOps",
    "Eagle3Draft",
    "LoadedDraft",
    "SplitEmbeddings",
    "Target",
    "TorchOps",
    "UnrollContext",
    "UserError",
    "capture_boundaries",
    "capture_final",
    "default_aux_layer_ids",
    "load_draft",
    "load_target",
    "save_draft",
]

# These import transformers, which takes seconds; `eagle3-core inspect` reads headers in less.
_FROM_TARGET = {"Target", "capture_boundaries", "capture_final", "load_target"}


def __getattr__(name: str) -> Any:
    if name in _FROM_TARGET:
        return getattr(importlib.import_module("eagle3_core.target"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
