"""The canonical draft under the methods that SpecForge 0.2.0's EAGLE-3 trainer calls.

    model = OnlineEagle3Model(SpecForgeDraft(config), length=7, attention_backend="sdpa")

SpecForge itself is not needed here. Where its own draft builds one layer whatever the config says,
this one has the config's layers, of either design; what is saved is the canonical checkpoint.
"""

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from eagle3_core.attention import UnrollContext
from eagle3_core.checkpoint import load_draft, save_draft
from eagle3_core.checkpoint.files import CheckpointFiles
from eagle3_core.config import DraftConfig
from eagle3_core.draft import Eagle3Draft
from eagle3_core.errors import UserError
from eagle3_core.ops import DraftOps
from eagle3_core.vocab import check_vocab_map

Cache = list[list[Any]]  # SpecForge's [[], []], filled by `backbone` from step to step


class SpecForgeDraft(Eagle3Draft):
    """An `Eagle3Draft` that SpecForge's `OnlineEagle3Model` can train (sdpa backend)."""

    vocab_mapping_loaded = False

    def __init__(self, config: DraftConfig, ops: DraftOps | None = None) -> None:
        super().__init__(config, ops)
        if not config.is_pruned:  # its loss indexes with the map whatever the vocabulary
            identity = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
            every = torch.ones(config.vocab_size, dtype=torch.bool)
            self.register_buffer("d2t", identity, persistent=False)
            self.register_buffer("t2d", every, persistent=False)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """[B,S] -> [B,S,H]."""
        return self.embed(input_ids)

    def project_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """[B,S,A·T] -> [B,S,H]."""
        return self.project(hidden_states)

    def prepare_decoder_attention_mask(
        self, attention_mask: Tensor, *_: object, **__: object
    ) -> Tensor:
        """Hand the [B,S] padding mask on to `backbone`, which builds what it needs from it."""
        return attention_mask

    def backbone(
        self,
        input_embeds: Tensor,
        hidden_states: Tensor,
        cache_hidden: Cache | None,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        past_key_values: object | None = None,
        use_cache: bool = True,
    ) -> Tensor:
        """One TTT step: embeddings and states [B,S,H] -> what the next step is fed [B,S,H].

        `cache_hidden` is [[], []] at step 0 and carries the keys on; None runs a single step.
        `attention_mask` [B,S] is true at real tokens.

        Raises:
            ValueError: another attention backend, or positions of several axes.
        """
        del use_cache
        if past_key_values is not None:
            raise ValueError("SpecForgeDraft runs with attention_backend='sdpa' only")
        if position_ids.dim() != 2:
            raise ValueError(f"position_ids has shape {tuple(position_ids.shape)}, expected [B,S]")
        steps = [] if cache_hidden is None else cache_hidden[0]
        # Padding is a document of its own: real tokens never see it, and its own rows stay finite.
        document_ids = None if attention_mask is None else attention_mask.to(torch.int64)
        context = steps[0] if steps else UnrollContext(document_ids, self.config.sliding_window)
        positions = position_ids.expand(input_embeds.shape[:2]) + len(steps)
        steps.append(context)
        return self.feedback(self(input_embeds, hidden_states, positions, context))

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[B,S,H] that `backbone` returned -> [B,S,D]."""
        if self.config.feedback == "post_norm":  # normed already
            return self.lm_head(hidden_states)
        return self.logits(hidden_states)

    def freeze_embedding(self) -> None:
        """Keep the embeddings as they are."""
        self.embed_tokens.weight.requires_grad_(False)

    @torch.no_grad()
    def load_embedding(
        self, model_path: str | Path, embedding_key: str = "model.embed_tokens.weight"
    ) -> None:
        """Copy the target's embeddings [V,H] from its folder.

        Raises:
            UserError: no such folder or tensor, or one of another shape.
        """
        files = CheckpointFiles.open(model_path)
        expected = tuple(self.embed_tokens.weight.shape)
        info = files.tensors.get(embedding_key)
        if info is None or info.shape != expected:
            found = "no" if info is None else f"shape {list(info.shape)} of"
            raise UserError(
                f"{files.where}: {found} {embedding_key}, expected shape {list(expected)}"
            )
        self.embed_tokens.weight.copy_(files.read(embedding_key))

    def load_vocab_mapping(self, file_path: str | Path) -> None:
        """Copy d2t and t2d from the file that SpecForge's data preparation wrote.

        Raises:
            UserError: not such a file, or a map that is not one.
        """
        try:
            found = torch.load(file_path, map_location="cpu", weights_only=True)
            d2t, t2d = found["d2t"], found["t2d"]
        except Exception as error:
            raise UserError(f"{file_path}: no vocabulary map: {error!r:.200}") from None
        if d2t.shape != self.d2t.shape:
            raise UserError(
                f"{file_path}: d2t has {len(d2t)} entries, expected {self.config.draft_vocab_size}"
            )
        check_vocab_map(d2t, t2d.bool(), self.config.vocab_size, f"{file_path}: d2t")
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)
        self.vocab_mapping_loaded = True

    @torch.no_grad()
    def save_pretrained(
        self, path: str | Path, state_dict: dict[str, Tensor] | None = None, **_: object
    ) -> None:
        """Write the canonical checkpoint, of `state_dict` where sharded weights were gathered.

        Raises:
            UserError: as `save_draft`.
        """
        if state_dict is None:
            save_draft(self, path)
            return
        with torch.device("meta"):
            gathered = Eagle3Draft(self.config)
        own = {n: state_dict[n] for n in gathered.state_dict()}
        gathered.load_state_dict(own, strict=True, assign=True)
        save_draft(gathered, path)

    @classmethod
    def from_pretrained(cls, path: str | Path, target: object | None = None) -> Self:
        """Read any checkpoint that `load_draft` reads.

        Raises:
            UserError: as `load_draft`.
        """
        return cls.of(load_draft(path, target=target).draft)

    @classmethod
    def of(cls, draft: Eagle3Draft) -> Self:
        """The same weights (not copies) under SpecForge's methods."""
        out = cls(draft.config, draft.ops)
        out.load_state_dict(draft.state_dict(keep_vars=True), strict=True, assign=True)
        return out
