"""The draft inside the engine: proposes a chain or tree per request, over a cache of its own.

Draft slot t pairs the target's states at position t with token t+1, and proposes token t+2. Between
rounds the slots of all verified tokens hold keys made from the target's true states; a proposal
appends slots made from fed-back states, which the next `extend` overwrites.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eagle3_core import Eagle3Draft
from eagle3_core.accept import inverse_cdf
from eagle3_core.tree import Frontier, TreeShape, grow_tree
from eagle3_serve.backend import Backend
from eagle3_serve.kv import Branches, KVStore, Segment
from eagle3_serve.padding import pad_rows
from eagle3_serve.proposal import Proposal
from eagle3_serve.sampling import processed_probs
from eagle3_serve.scheduler import Request


class Drafter:
    """Runs a draft for a batch of requests."""

    def __init__(
        self, draft: Eagle3Draft, num_slots: int, acceptance: str, backend: Backend
    ) -> None:
        """`draft` is one that `backend` has prepared."""
        config = draft.config
        weight = draft.norm.weight
        self.draft = draft
        self._backend = backend
        self._acceptance = acceptance
        self._device = weight.device
        self.store = KVStore(
            config.num_hidden_layers,
            config.num_key_value_heads,
            config.head_dim,
            num_slots,
            weight.dtype,
            weight.device,
        )

    def reach(self, request: Request) -> int:
        """How deep drafts may go: no slot is read behind the positions that the draft knows."""
        return max(0, self.draft.config.max_position_embeddings - request.num_held + 1)

    def propose(
        self, requests: Sequence[Request], depths: Sequence[int], shape: TreeShape
    ) -> list[Proposal]:
        """Drafts of `shape` for each request, cut off at its own depth; 0 is nothing."""
        proposals = [Proposal()] * len(requests)
        live = [i for i, depth in enumerate(depths) if depth]
        if live:
            propose = self._chains if shape.topk == 1 else self._trees
            drafted = propose([requests[i] for i in live], [depths[i] for i in live], shape)
            for i, proposal in zip(live, drafted, strict=True):
                proposals[i] = proposal
        return proposals

    def _chains(
        self, requests: Sequence[Request], depths: Sequence[int], shape: TreeShape
    ) -> list[Proposal]:
        logits = torch.stack([r.draft_logits for r in requests])
        states = torch.stack([r.feedback for r in requests])
        chains: list[list[int]] = [[] for _ in requests]  # of draft ids
        laws: list[list[Tensor]] = [[] for _ in requests]
        live = list(range(len(requests)))
        for step in range(max(depths)):
            rows = [requests[i] for i in live]
            chosen = self._choose(logits, rows, step)
            for i, (draft_id, law) in zip(live, chosen, strict=True):
                chains[i].append(draft_id)
                laws[i] += [] if law is None else [law]
            kept = [row for row, i in enumerate(live) if depths[i] > step + 1]
            live = [live[row] for row in kept]
            if not live:
                break
            segments = [self._segment(row, requests[i], 1, step) for row, i in enumerate(live)]
            ids = torch.tensor([chains[i][-1] for i in live], device=self._device)
            hidden = self._run(self.draft.to_target_ids(ids), states[kept], segments)
            states, logits = self.draft.feedback(hidden), self._logits(hidden)
        return [
            Proposal(
                self.draft.to_target_ids(torch.tensor(chain, device=self._device)).tolist(),
                range(len(chain)),
                chain,
                torch.stack(own) if own else None,
            )
            for chain, own in zip(chains, laws, strict=True)
        ]

    def _trees(
        self, requests: Sequence[Request], depths: Sequence[int], shape: TreeShape
    ) -> list[Proposal]:
        """Branches are what the draft finds most likely, for sampled requests too.

        The frontiers take slots behind the held ones, one after the other; the next `extend` and
        rounds write over them.
        """
        held = torch.tensor([r.num_held for r in requests], device=self._device)
        states = torch.stack([r.feedback for r in requests]).unsqueeze(1)
        widths: list[int] = []

        def expand(frontier: Frontier) -> Tensor:
            nonlocal states
            past, width = sum(widths), frontier.tokens.shape[1]
            widths.append(width)
            levels = torch.arange(frontier.depth, device=self._device)
            slots = levels.repeat_interleave(torch.tensor(widths, device=self._device))
            seen = [
                frontier.lineage[..., i, None] == torch.arange(w, device=self._device)
                for i, w in enumerate(widths)
            ]
            visible = torch.cat(seen, -1)
            segments = [
                replace(
                    self._segment(b * width, r, width, past),
                    branches=Branches(held[b] + slots, visible[b]),
                )
                for b, r in enumerate(requests)
            ]
            rows = torch.arange(len(requests), device=self._device).unsqueeze(1)
            states = states[rows, frontier.parent_rows]
            hidden = self._run(frontier.tokens.flatten(), states.flatten(0, 1), segments)
            states = self.draft.feedback(hidden).unflatten(0, (len(requests), width))
            return self._logits(hidden).unflatten(0, (len(requests), width))

        roots = torch.tensor([r.tokens[-1] for r in requests], device=self._device)
        logits = torch.stack([r.draft_logits for r in requests])
        d2t = self.draft.d2t if self.draft.config.is_pruned else None
        tree = grow_tree(roots, logits, expand, shape.cut(max(depths)), d2t)
        rows = zip(tree.tokens.tolist(), tree.parents.tolist(), depths, strict=True)
        return [Proposal(tokens[1:], parents[1:]).cut(depth) for tokens, parents, depth in rows]

    def extend(self, requests: Sequence[Request], aux: Tensor, counts: Sequence[int]) -> None:
        """Fill the slots of newly verified tokens, and say what may follow for who decodes.

        Args:
            requests: their `tokens` and `num_held` as after the round.
            aux: [sum(counts), A·T], the target's states at the last `counts[i]` held positions.
            counts: slots to fill per request.
        """
        segments, tokens, first = [], [], 0
        for request, count in zip(requests, counts, strict=True):
            segments.append(self._segment(first, request, count, -count))
            tokens += request.tokens[request.num_held - count + 1 : request.num_held + 1]
            first += count
        states = self.draft.project(pad_rows(aux)[None])[0, : len(aux)]
        hidden = self._run(torch.tensor(tokens, device=self._device), states, segments)
        # Neither a piece of a prompt nor what has ended, or ends with its next token, needs drafts.
        live = [i for i, r in enumerate(requests) if r.needs_draft]
        if not live:
            return
        last = hidden[[segments[i].first_row + segments[i].num_rows - 1 for i in live]]
        rows = zip(live, self._logits(last), self.draft.feedback(last), strict=True)
        for i, logits, state in rows:
            requests[i].draft_logits, requests[i].feedback = logits, state

    def _segment(self, row: int, request: Request, count: int, offset: int) -> Segment:
        return Segment(row, count, request.table, request.num_held + offset, self._device)

    def _run(self, tokens: Tensor, states: Tensor, segments: Sequence[Segment]) -> Tensor:
        """tokens [R], states [R,H] -> [R,H], before the final norm."""
        positions = pad_rows(torch.cat([s.positions for s in segments]))[None]
        context = self._backend.context(self.store, segments, self.draft.config.sliding_window)
        embeddings = self.draft.embed_lazily(pad_rows(tokens)[None])
        hidden = self.draft(embeddings, pad_rows(states)[None], positions, context)
        return hidden[0, : len(tokens)]

    def _logits(self, hidden: Tensor) -> Tensor:
        """[R,H] -> [R,D], fp32 for whoever chooses from them, as the target's are."""
        logits = self.draft.logits(pad_rows(hidden))[: len(hidden)]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _choose(
        self, logits: Tensor, requests: Sequence[Request], step: int
    ) -> list[tuple[int, Tensor | None]]:
        """The draft id that each row [R,D] proposes, and the law [D] if block verification asks."""
        chosen = logits.argmax(-1).tolist()
        laws: list[Tensor | None] = [None] * len(requests)
        for row, request in enumerate(requests):
            if request.params.is_greedy:
                continue
            law = processed_probs(logits[row], request.params)
            start = len(request.tokens)
            if self._acceptance == "block":
                # A position may be drafted by several rounds, so its coins belong to the round.
                laws[row] = law
                own = request.coin(start, f" draft {step}")
            else:
                # The coin that will choose the target's own token there: where draft and target
                # agree in distribution they agree in the token.
                own = request.coin(start + step)
            coin = torch.tensor(own, dtype=torch.float64, device=law.device)
            chosen[row] = int(inverse_cdf(law, coin))
        return list(zip(chosen, laws, strict=True))
