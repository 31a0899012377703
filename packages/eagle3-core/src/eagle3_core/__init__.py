"""The canonical EAGLE-3 draft: module, vocabulary map, acceptance laws and checkpoints."""

from eagle3_core.attention import AttentionContext, CacheContext, UnrollContext
from eagle3_core.checkpoint import LoadedDraft, load_draft, save_draft
from eagle3_core.config import DraftConfig, default_aux_layer_ids
from eagle3_core.draft import Eagle3Draft
from eagle3_core.errors import UserError
from eagle3_core.ops import DraftOps, TorchOps
from eagle3_core.target import Target, capture_boundaries, capture_final, load_target

__all__ = [
    "AttentionContext",
    "CacheContext",
    "DraftConfig",
    "DraftOps",
    "Eagle3Draft",
    "LoadedDraft",
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
