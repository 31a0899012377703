"""The engine: one round for the running batch at a time.

A round drafts a chain per request, runs the target once over the new rows of all requests (a piece
of a prompt, or the last token and its drafts), keeps what the target itself would have chosen, and
fills the draft's slots from the target's true states. Requests join and leave between rounds.
Without a draft the same rounds decode plainly.
"""

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic

import torch
from torch import Tensor

from eagle3_core import DraftConfig, Eagle3Draft, UserError
from eagle3_core.pair import check_pair
from eagle3_core.target import Target
from eagle3_core.tree import TreeShape
from eagle3_serve.backend import choose_backend
from eagle3_serve.config import EngineConfig
from eagle3_serve.constraints import Constraint, Grammars
from eagle3_serve.drafter import Drafter
from eagle3_serve.kv import Segment
from eagle3_serve.metrics import EngineStats, RequestStats
from eagle3_serve.pages import PagePool, PageTable
from eagle3_serve.processors import LogitsProcessor, needs_processor
from eagle3_serve.proposal import Proposal
from eagle3_serve.sampling import SamplingParams
from eagle3_serve.scheduler import Limits, Request, Scheduler, Turn, fresh_seed
from eagle3_serve.stop import FinishReason, OutputStream
from eagle3_serve.target import TargetRunner, kv_shape, positions
from eagle3_serve.verify import Emission, RoundTrace, TokenLogprobs, emissions, path_logprobs


class QueueFullError(RuntimeError):
    """Too many requests are waiting; a server answers it with a 503."""


@dataclass(frozen=True)
class TokenOutput:
    """What a round added to a request."""

    request_id: str
    token_ids: list[int]  # new ones; nothing behind the end
    text: str  # new text that is safe to show
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_output_tokens: int  # all so far
    num_cached_tokens: int  # of the prompt, which a request before had run already
    stats: RequestStats  # all so far; the engine goes on counting in it
    # Why it ended before its time; finish_reason is "abort" or "timeout" then.
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None  # of the new tokens, where asked for
    trace: RoundTrace | None = None  # of this round, where asked for


class Engine:
    """Decodes a batch of requests with a target and, if there is one, its draft."""

    def __init__(self, target: Target, draft: Eagle3Draft | None, config: EngineConfig) -> None:
        """Take memory for keys and values as `config` allows, and run a few tokens as a check.

        On a CPU the linears of target and draft are packed in place: both can be run afterwards,
        by several engines too, but not trained or saved.

        Raises:
            UserError: the draft does not belong to the target, the context does not fit, or the
                target's architecture is not one for this engine, or not one for `exact`.
        """
        shape = config.shape if draft is not None else None
        if draft is not None:
            check_draft(target, draft)
        self.target = target
        self.stats = EngineStats()
        self.grammars = Grammars(target.tokenizer, target.vocab_size, target.eos_token_ids)
        self._shape = shape
        self._d2t = draft.d2t if draft is not None and draft.config.is_pruned else None
        self._device = target.model.device
        self._backend = choose_backend(config.ops, self._device)
        round_slots = _round_slots(shape)
        self.max_model_len, num_pages = _sizes(target, draft, config, round_slots)
        num_positions = self.max_model_len + round_slots
        read = draft.config if draft is not None and shape else None
        self._runner = TargetRunner(
            target,
            self._backend,
            num_positions,
            read.aux_layer_ids or () if read else (),
            final_norm=read is not None and read.aux_source == "final_norm",
        )
        num_slots = num_pages * config.page_size
        self._store = self._runner.new_store(num_slots)
        with torch.inference_mode():
            self._runner.check(self._store)
        if config.exact:
            self._runner.check_exact()
        self._drafter = None
        if draft is not None and shape is not None:
            self._backend.check_shape(shape)
            self._backend.prepare(draft, num_positions)
            self._drafter = Drafter(draft, num_slots, config.acceptance, self._backend)
        self.config = config
        self._pool = PagePool(num_pages, config.page_size, self._drafter is not None)
        limits = Limits(
            config.max_batch_size, config.max_num_batched_tokens, self.max_model_len, round_slots
        )
        self._scheduler = Scheduler(limits, self._pool, self._copy_page)
        self._requests: dict[str, Request] = {}

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._requests)

    @property
    def num_free_pages(self) -> int:
        """Pages of keys and values that no request holds."""
        return self._pool.num_free

    @property
    def num_pages(self) -> int:
        """Pages of keys and values in all."""
        return self._pool.num_pages

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._scheduler.running)

    @property
    def num_preemptions(self) -> int:
        """How often a request had to give its pages up."""
        return self._scheduler.num_preemptions

    @property
    def draft_config(self) -> DraftConfig | None:
        """The draft's; None when decoding plainly."""
        return None if self._drafter is None else self._drafter.draft.config

    @property
    def num_waiting(self) -> int:
        """Requests that have not started, or had to give their pages up."""
        return len(self._scheduler.waiting)

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Length, prompt included, at which a request would end at the latest.

        Raises:
            UserError: it can never fit, or a token id is not the target's.
        """
        limit = self._scheduler.limit(prompt_ids, params)
        biased = [token_id for token_id, _ in params.logit_bias]
        for name, ids in (("prompt", prompt_ids), ("logit_bias", biased)):
            wrong = next((i for i in ids if not 0 <= i < self.target.vocab_size), None)
            if wrong is not None:
                last = self.target.vocab_size - 1
                raise UserError(f"{name}: token id {wrong} is not in 0..{last}")
        return limit

    def add(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None
    ) -> str:
        """Queue a request; returns its id.

        Raises:
            UserError: it can never fit, or a token id is not the target's.
            QueueFullError: `max_queue_size` requests wait already.
        """
        limit = self.check(prompt_ids, params)
        longest = self.config.max_queue_size
        if longest is not None and self.num_waiting >= longest + self._scheduler.num_places:
            raise QueueFullError(f"{self.num_waiting} requests are waiting; try again later")
        # The output ends at the context limit at the latest.
        params = replace(params, max_tokens=limit - len(prompt_ids))
        request_id = uuid.uuid4().hex if request_id is None else request_id
        if request_id in self._requests:
            raise UserError(f"request_id: {request_id!r} is in use, expected a fresh one")
        constraint = None if params.grammar is None else self.grammars.start(params.grammar)
        request = Request(
            id=request_id,
            prompt_len=len(prompt_ids),
            tokens=list(prompt_ids),
            params=params,
            seed=fresh_seed() if params.seed is None else params.seed,
            limit=limit,
            stream=OutputStream(
                self.target.tokenizer, params, self.target.eos_token_ids, constraint
            ),
            processor=self._processor(prompt_ids, params, constraint),
            table=PageTable(self._pool),
            deadline=monotonic() + (self.config.request_timeout_s or math.inf),
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
        """One round; outputs of every request that has come further."""
        late = self._expire()
        turns = self._scheduler.plan()
        if not turns:
            return late
        with self.stats.timed("draft"):
            drafts = self._draft(turns)
        with self.stats.timed("verify"):
            segments, logits, aux = self._verify(turns, drafts)
        with self.stats.timed("accept"):
            outputs, kept = self._accept(turns, drafts, segments, logits)
        with self.stats.timed("extend"):
            self._extend(turns, segments, kept, aux)
        for output in outputs:
            if output.finish_reason is not None:
                self._drop(self._requests[output.request_id])
        self._scheduler.check_idle()
        return late + outputs

    def _processor(
        self, prompt_ids: Sequence[int], params: SamplingParams, constraint: Constraint | None
    ) -> LogitsProcessor | None:
        if not needs_processor(params):
            return None
        end_ids = params.end_ids(self.target.eos_token_ids)
        size = self.target.vocab_size
        return LogitsProcessor(params, prompt_ids, end_ids, size, self._device, constraint)

    def _expire(self) -> list[TokenOutput]:
        """End the requests whose time is over."""
        now = monotonic()
        late = [r for r in self._requests.values() if r.deadline < now]
        for request in late:
            self._drop(request)
        reason = f"took longer than {self.config.request_timeout_s} s"
        return [_output(request, [], "", "timeout", reason) for request in late]

    def _draft(self, turns: Sequence[Turn]) -> list[Proposal]:
        """Drafts for each request; none for one whose prompt has not run yet."""
        if self._drafter is None or self._shape is None:
            return [Proposal()] * len(turns)
        requests = [turn.request for turn in turns]
        depth = self._shape.num_speculative_tokens
        # A round emits up to depth + 1 tokens, and no more than may still come are of use.
        depths = [
            min(depth, r.num_left - 1, self._drafter.reach(r)) if r.is_decoding else 0
            for r in requests
        ]
        return self._drafter.propose(requests, depths, self._shape)

    def _verify(
        self, turns: Sequence[Turn], drafts: Sequence[Proposal]
    ) -> tuple[list[Segment], Tensor, Tensor]:
        """Run the target over what it has not seen yet and the drafts.

        Returns:
            The rows of each request, logits [.,V] after the last token and the drafts of each
            request that has all its tokens run, and the aux states of all rows.
        """
        tokens: list[int] = []
        logit_rows: list[int] = []
        segments = []
        for turn, proposal in zip(turns, drafts, strict=True):
            request, past = turn.request, turn.request.num_held
            new = [*request.tokens[past : past + turn.num_tokens], *proposal.tokens]
            branches = proposal.branches(past, self._device)
            segments.append(
                Segment(len(tokens), len(new), request.table, past, self._device, branches)
            )
            tokens += new
            if turn.is_last:
                logit_rows += range(len(tokens) - proposal.num_rows, len(tokens))
        positions = torch.cat([s.positions for s in segments])
        context = self._backend.context(self._store, segments, exact=self.config.exact)
        logits, aux = self._runner.forward(
            torch.tensor(tokens, device=self._device),
            positions,
            context,
            torch.tensor(logit_rows, dtype=torch.int64, device=self._device),
        )
        return segments, logits, aux

    def _accept(
        self,
        turns: Sequence[Turn],
        drafts: Sequence[Proposal],
        segments: Sequence[Segment],
        logits: Tensor,
    ) -> tuple[list[TokenOutput], list[Sequence[int]]]:
        """Emit what the target itself would have chosen.

        Returns:
            Outputs of those that emit, and the rows of each segment whose tokens are certain now.
        """
        last = [i for i, turn in enumerate(turns) if turn.is_last]
        kept: list[Sequence[int]] = [range(turn.num_tokens) for turn in turns]
        for turn in turns:
            if not turn.is_last:
                turn.request.num_held += turn.num_tokens
        if not last:
            return [], kept
        proposals = [drafts[i] for i in last]
        requests = [turns[i].request for i in last]
        counts = [proposal.num_rows for proposal in proposals]
        sound = logits.amax(-1).isfinite()  # a NaN is its row's maximum
        if not sound.all():
            logits = logits.masked_fill(~sound[:, None], 0.0)  # for the others to go on
        emitted = emissions(logits, requests, proposals, self._d2t)
        outputs = []
        rows = zip(sound.split(counts), logits.split(counts), strict=True)
        for request, proposal, emission, (ok, own_logits), i in zip(
            requests, proposals, emitted, rows, last, strict=True
        ):
            error = request.failure
            if not ok.all():
                error = "the target's logits are not finite; its weights or dtype do not fit"
            if error is None:
                output = self._commit(request, proposal, emission, own_logits)
                path = emission.path
                known = turns[i].num_tokens - 1
                certain = [*range(known), *(known + row for row in path)]
                kept[i] = certain[: known + len(output.token_ids)]
                self._store.keep(segments[i], kept[i])
                request.num_held += len(kept[i])
                outputs.append(output)
            else:
                kept[i] = ()
                outputs.append(_output(request, [], "", "abort", error))
        return outputs, kept

    def _commit(
        self, request: Request, proposal: Proposal, emission: Emission, logits: Tensor
    ) -> TokenOutput:
        """Append what a request emits, up to where the output ends; logits of all its rows."""
        tokens, path = emission
        said = None
        if request.params.logprobs is not None:
            paths = [proposal.paths[row] for row in path]
            said = path_logprobs(logits[path], request, paths, tokens)
        was_decoding, request.is_decoding = request.is_decoding, True
        is_first = not request.stream.token_ids
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
        if is_first:
            self.stats.num_prompt_tokens += request.prompt_len
            self.stats.num_cached_tokens += request.num_cached_tokens or 0
        accepted = min(len(tokens) - 1, len(kept))
        if was_decoding:
            for stats in (request.stats, self.stats):
                stats.count(len(proposal.tokens), proposal.depth, accepted, len(kept))
        output = _output(request, kept, request.stream.take_text(), reason)
        trace = RoundTrace.of(proposal, path[1 : 1 + accepted]) if request.params.trace else None
        return replace(output, logprobs=said and said[: len(kept)], trace=trace)

    def _extend(
        self,
        turns: Sequence[Turn],
        segments: Sequence[Segment],
        kept: Sequence[Sequence[int]],
        aux: Tensor,
    ) -> None:
        """Let the draft read the target's states of all tokens that are now certain.

        What has ended is read as well, so that the next request with the same beginning finds it.
        """
        requests = [turn.request for turn in turns]
        if self._drafter is not None:
            read, counts, rows = [], [], []
            for request, segment, own in zip(requests, segments, kept, strict=True):
                if own:  # nothing of a request that failed
                    read.append(request)
                    counts.append(len(own))
                    rows += [segment.first_row + row for row in own]
            if read:
                self._drafter.extend(read, aux[rows], counts)
        self._scheduler.remember(requests)

    def _copy_page(self, source: int, target: int) -> None:
        size = self.config.page_size
        slots = [slice(page * size, (page + 1) * size) for page in (source, target)]
        self._store.copy(*slots)
        if self._drafter is not None:
            self._drafter.store.copy(*slots)

    def _drop(self, request: Request) -> None:
        self._scheduler.remove(request)
        del self._requests[request.id]


def _output(
    request: Request,
    token_ids: list[int],
    text: str,
    finish_reason: FinishReason | None,
    error: str | None = None,
) -> TokenOutput:
    return TokenOutput(
        request_id=request.id,
        token_ids=token_ids,
        text=text,
        finish_reason=finish_reason,
        num_prompt_tokens=request.prompt_len,
        num_output_tokens=len(request.stream.token_ids),
        num_cached_tokens=request.num_cached_tokens or 0,
        stats=request.stats,
        error=error,
    )


def _round_slots(shape: TreeShape | None) -> int:
    """Slots a request needs behind its last held one: to verify all rows, or to draft them."""
    if shape is None:
        return 1
    return max(shape.num_nodes, (shape.num_speculative_tokens - 1) * shape.topk)


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
    if config.aux_source == "boundaries" and config.aux_layer_ids is None:
        raise UserError(
            "draft: aux_layer_ids is not set, expected the boundary ids it was trained on"
        )
    if draft.norm.weight.dtype != target.model.dtype:
        raise UserError(
            f"draft: dtype is {draft.norm.weight.dtype}, but the target's is {target.model.dtype}; "
            "load both with the same"
        )


def _sizes(
    target: Target, draft: Eagle3Draft | None, config: EngineConfig, round_slots: int
) -> tuple[int, int]:
    """(max_model_len, pages). A sequence of that length has room for its last round."""
    layers, heads, head_dim = kv_shape(target)
    values = layers * heads * head_dim
    if draft is not None:
        own = draft.config
        values += own.num_hidden_layers * own.num_key_value_heads * own.head_dim
    num_bytes = 2 * values * target.model.dtype.itemsize
    affordable = int(config.kv_cache_gib * 2**30 / num_bytes) // config.page_size
    room = affordable * config.page_size - (round_slots - 1)
    window = positions(target)
    longest = min(window, room)
    wanted = config.max_model_len
    if wanted is not None and wanted > window:
        raise UserError(
            f"max_model_len is {wanted}, but the target {target.name} ends at {window} positions"
        )
    if longest < (wanted or 2):
        raise UserError(
            f"kv_cache_gib is {config.kv_cache_gib}, room for {max(room, 0)} tokens; raise it, or "
            f"lower max_model_len to that"
        )
    return wanted or longest, affordable
