"""The engine: one round for the running batch at a time.

A round drafts a chain per request, runs the target once over the new rows of all requests (a whole
prompt, or the last token and its drafts), keeps what the target itself would have chosen, and fills
the draft's slots from the target's true states. Requests join and leave between rounds. Without a
draft the same rounds decode plainly.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3_core import Eagle3Draft, UserError
from eagle3_core.pair import check_pair
from eagle3_core.target import Target
from eagle3_serve.config import EngineConfig
from eagle3_serve.drafter import Drafter
from eagle3_serve.kv import PackedContext, Segment
from eagle3_serve.metrics import EngineStats, RequestStats
from eagle3_serve.processors import LogitsProcessor, needs_processor
from eagle3_serve.sampling import SamplingParams
from eagle3_serve.scheduler import Request, Scheduler, fresh_seed
from eagle3_serve.stop import FinishReason, OutputStream
from eagle3_serve.target import TargetRunner, kv_shape
from eagle3_serve.verify import chain_paths, emitted, target_choices


@dataclass(frozen=True)
class TokenOutput:
    """What a round added to a request."""

    request_id: str
    token_ids: list[int]  # new ones; nothing behind the end
    text: str  # new text that is safe to show
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_output_tokens: int  # all so far
    stats: RequestStats  # all so far; the engine goes on counting in it


class Engine:
    """Decodes a batch of requests with a target and, if there is one, its draft."""

    def __init__(self, target: Target, draft: Eagle3Draft | None, config: EngineConfig) -> None:
        """Take memory for keys and values as `config` allows, and run a few tokens as a check.

        On a CPU the linears of target and draft are packed in place: both can be run afterwards,
        by several engines too, but not trained or saved.

        Raises:
            UserError: the draft does not belong to the target, the context does not fit, or the
                target's architecture is not one for this engine.
        """
        depth = config.num_speculative_tokens if draft is not None else 0
        if draft is not None:
            check_draft(target, draft)
        self.target = target
        self.stats = EngineStats()
        self._depth = depth
        self._device = target.model.device
        self._runner = TargetRunner(
            target, draft.config.aux_layer_ids or () if draft is not None and depth else ()
        )
        max_model_len, num_slots = _sizes(target, draft, config)
        self.max_model_len = max_model_len
        self._store = self._runner.new_store(num_slots)
        with torch.inference_mode():
            self._runner.check(self._store)
        self._drafter = Drafter(draft, num_slots) if draft is not None and depth else None
        self._scheduler = Scheduler(config.max_batch_size, max_model_len, num_slots)
        self._requests: dict[str, Request] = {}

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._requests)

    @property
    def num_free_slots(self) -> int:
        """Positions of keys and values that no request owns."""
        return self._scheduler.num_free_slots

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Length, prompt included, at which a request would end at the latest.

        Raises:
            UserError: it can never fit, or a token id is not the target's.
        """
        limit = self._scheduler.limit(prompt_ids, params)
        wrong = next((t for t in prompt_ids if not 0 <= t < self.target.vocab_size), None)
        if wrong is not None:
            raise UserError(f"prompt: token id {wrong} is not in 0..{self.target.vocab_size - 1}")
        return limit

    def add(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None
    ) -> str:
        """Queue a request; returns its id.

        Raises:
            UserError: it can never fit, or a token id is not the target's.
        """
        limit = self.check(prompt_ids, params)
        # The output ends at the context limit at the latest.
        params = replace(params, max_tokens=limit - len(prompt_ids))
        request_id = uuid.uuid4().hex if request_id is None else request_id
        if request_id in self._requests:
            raise UserError(f"request_id: {request_id!r} is in use, expected a fresh one")
        request = Request(
            id=request_id,
            prompt_len=len(prompt_ids),
            tokens=list(prompt_ids),
            params=params,
            seed=fresh_seed() if params.seed is None else params.seed,
            limit=limit,
            stream=OutputStream(self.target.tokenizer, params, self.target.eos_token_ids),
            processor=self._processor(prompt_ids, params),
        )
        self._requests[request_id] = request
        self._scheduler.add(request)
        return request_id

    def reset_stats(self) -> None:
        """Count from zero."""
        self.stats = EngineStats()

    def abort(self, request_id: str) -> None:
        """Drop a request and free what it holds; unknown ids are those that have ended."""
        if request_id in self._requests:
            self._drop(self._requests[request_id])

    @torch.inference_mode()
    def step(self) -> list[TokenOutput]:
        """One round; outputs of every request that ran in it."""
        batch = self._scheduler.admit()
        if not batch:
            return []
        with self.stats.timed("draft"):
            drafts = self._draft(batch)
        with self.stats.timed("verify"):
            segments, logits, aux = self._verify(batch, drafts)
        with self.stats.timed("accept"):
            choices = target_choices(logits, batch, [chain_paths(chain) for chain in drafts])
            rows = zip(batch, drafts, emitted(drafts, choices), segments, strict=True)
            outputs = [self._commit(*row) for row in rows]
        with self.stats.timed("extend"):
            self._extend(batch, segments, aux)
        for request, output in zip(batch, outputs, strict=True):
            if output.finish_reason is not None:
                self._drop(request)
        return outputs

    def _processor(
        self, prompt_ids: Sequence[int], params: SamplingParams
    ) -> LogitsProcessor | None:
        if not needs_processor(params):
            return None
        end_ids = params.end_ids(self.target.eos_token_ids)
        return LogitsProcessor(params, prompt_ids, end_ids, self.target.vocab_size, self._device)

    def _draft(self, batch: Sequence[Request]) -> list[list[int]]:
        """A chain per request; none for one whose prompt has not run yet."""
        if self._drafter is None:
            return [[] for _ in batch]
        # A round emits up to depth + 1 tokens, and no more than may still come are of use.
        depths = [min(self._depth, r.num_left - 1) if r.num_held else 0 for r in batch]
        return self._drafter.propose(batch, depths)

    def _verify(
        self, batch: Sequence[Request], drafts: Sequence[Sequence[int]]
    ) -> tuple[list[Segment], Tensor, Tensor]:
        """Run the target over what it has not seen yet and the drafts.

        Returns:
            The rows of each request, logits [.,V] after each request's last token and its drafts,
            and the aux states of all rows.
        """
        tokens: list[int] = []
        logit_rows: list[int] = []
        segments = []
        for request, chain in zip(batch, drafts, strict=True):
            new = request.tokens[request.num_held :] + list(chain)
            segments.append(
                Segment(len(tokens), len(new), request.slot, request.num_held, self._device)
            )
            tokens += new
            logit_rows += range(len(tokens) - len(chain) - 1, len(tokens))
        positions = torch.cat([s.positions for s in segments])
        context = PackedContext(self._store, segments)
        logits, aux = self._runner.forward(
            torch.tensor(tokens, device=self._device),
            positions,
            context,
            torch.tensor(logit_rows, device=self._device),
        )
        return segments, logits, aux

    def _commit(
        self, request: Request, chain: Sequence[int], tokens: Sequence[int], segment: Segment
    ) -> TokenOutput:
        """Append what the round emits, up to where the output ends."""
        was_prompt = request.num_held == 0
        # Keys behind the accepted drafts stay in their slots until the next round overwrites them.
        request.num_held = segment.length - len(chain) + len(tokens) - 1
        kept: list[int] = []
        reason = None
        for token in tokens:
            kept.append(token)
            reason = request.stream.push(token)
            if reason is not None:
                break
        request.tokens += kept
        if request.processor is not None:
            request.processor.advance(kept)
        self.stats.num_output_tokens += len(kept)
        if was_prompt:
            self.stats.num_prompt_tokens += request.prompt_len
        else:
            for stats in (request.stats, self.stats):
                stats.count(len(chain), min(len(tokens) - 1, len(kept)), len(kept))
        return TokenOutput(
            request_id=request.id,
            token_ids=kept,
            text=request.stream.take_text(),
            finish_reason=reason,
            num_prompt_tokens=request.prompt_len,
            num_output_tokens=len(request.stream.token_ids),
            stats=request.stats,
        )

    def _extend(self, batch: Sequence[Request], segments: Sequence[Segment], aux: Tensor) -> None:
        """Let the draft read the target's states of all tokens that are now certain."""
        if self._drafter is None:
            return
        requests, counts, rows = [], [], []
        for request, segment in zip(batch, segments, strict=True):
            # One token that is left needs no draft; a request that has ended needs nothing.
            if request.stream.finish_reason is None and request.num_left > 1:
                count = request.num_held - segment.past
                requests.append(request)
                counts.append(count)
                rows += range(segment.first_row, segment.first_row + count)
        if requests:
            self._drafter.extend(requests, aux[rows], counts)

    def _drop(self, request: Request) -> None:
        self._scheduler.remove(request)
        del self._requests[request.id]


def check_draft(target: Target, draft: Eagle3Draft) -> None:
    """Check that a draft belongs to a target and that this engine can run it.

    Raises:
        UserError: names the first choice or size that does not fit.
    """
    config = draft.config
    check_pair(
        "draft",
        config,
        target.name,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
    )
    if config.aux_source == "final_norm":
        raise UserError(
            "draft: aux_source is final_norm, expected boundaries; this engine does not "
            "hand a draft the state behind the target's final norm"
        )
    if config.aux_layer_ids is None:
        raise UserError(
            "draft: aux_layer_ids is not set, expected the boundary ids it was trained on"
        )
    if draft.norm.weight.dtype != target.model.dtype:
        raise UserError(
            f"draft: dtype is {draft.norm.weight.dtype}, but the target's is {target.model.dtype}; "
            "load both with the same"
        )


def _sizes(target: Target, draft: Eagle3Draft | None, config: EngineConfig) -> tuple[int, int]:
    """(max_model_len, slots)."""
    layers, heads, head_dim = kv_shape(target)
    values = layers * heads * head_dim
    if draft is not None:
        own = draft.config
        values += own.num_hidden_layers * own.num_key_value_heads * own.head_dim
    affordable = int(config.kv_cache_gib * 2**30 / (2 * values * target.model.dtype.itemsize))
    longest = min(target.max_position_embeddings, affordable)
    wanted = config.max_model_len
    if wanted is not None and wanted > target.max_position_embeddings:
        raise UserError(
            f"max_model_len is {wanted}, but the target {target.name} ends at "
            f"{target.max_position_embeddings} positions"
        )
    if longest < (wanted or 2):
        raise UserError(
            f"kv_cache_gib is {config.kv_cache_gib}, room for {affordable} tokens; raise it, or "
            f"lower max_model_len to that"
        )
    max_model_len = wanted or longest
    return max_model_len, min(affordable, config.max_batch_size * max_model_len)
