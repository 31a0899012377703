"""The draft inside the engine: proposes a chain per request, over keys and values of its own.

Draft slot t pairs the target's states at position t with token t+1, and proposes token t+2. Between
rounds the slots of all verified tokens hold keys made from the target's true states; a proposal
appends slots made from fed-back states, which the next `extend` overwrites.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from eagle3_core import Eagle3Draft, TorchOps
from eagle3_core.packed import PackedLinear, can_pack, is_packing_available, pack_linears
from eagle3_serve.kv import KVStore, PackedContext, Segment
from eagle3_serve.padding import pad_rows
from eagle3_serve.sampling import choose
from eagle3_serve.scheduler import Request


class PackedOps(TorchOps):
    """The reference ops with a head packed for a CPU."""

    def __init__(self, lm_head: nn.Linear) -> None:
        self._head = PackedLinear(lm_head)

    def draft_head(self, h: Tensor, norm_weight: Tensor, eps: float, head: Tensor) -> Tensor:
        return self._head(self.rms_norm(h, norm_weight, eps))


def pack_draft(draft: Eagle3Draft) -> None:
    """Pack a draft on a CPU in place; it can be run afterwards, not trained or saved."""
    if is_packing_available() and can_pack(draft.lm_head.weight):
        # The head stays where it is: `logits` reads its weight, which a packed layer would copy.
        draft.ops = PackedOps(draft.lm_head)
        pack_linears(draft.layers)
        if draft.config.has_fc and isinstance(draft.fc, nn.Linear):
            draft.register_module("fc", PackedLinear(draft.fc))


class Drafter:
    """Runs a draft for a batch of requests."""

    def __init__(self, draft: Eagle3Draft, num_slots: int) -> None:
        config = draft.config
        weight = draft.norm.weight
        pack_draft(draft)
        self.draft = draft
        self._device = weight.device
        self.store = KVStore(
            config.num_hidden_layers,
            config.num_key_value_heads,
            config.head_dim,
            num_slots,
            weight.dtype,
            weight.device,
        )

    def propose(self, requests: Sequence[Request], depths: Sequence[int]) -> list[list[int]]:
        """A chain of `depths[i]` tokens for each request; the first is known from `extend`."""
        chains = [
            [r.first_draft] if depth else [] for r, depth in zip(requests, depths, strict=True)
        ]
        for step in range(1, max(depths, default=0)):
            live = [i for i, depth in enumerate(depths) if depth > step]
            rows = [requests[i] for i in live]
            segments = [self._segment(row, r, 1, step - 1) for row, r in enumerate(rows)]
            tokens = torch.tensor([chains[i][-1] for i in live], device=self._device)
            states = torch.stack([r.feedback for r in rows])
            hidden = self._run(tokens, states, segments)
            # The token proposed at this step stands at position len(tokens) + step.
            chosen = self._choose(hidden, rows, [len(r.tokens) + step for r in rows])
            for i, request, token, state in zip(
                live, rows, chosen, self.draft.feedback(hidden), strict=True
            ):
                chains[i].append(token)
                request.feedback = state
        return chains

    def extend(self, requests: Sequence[Request], aux: Tensor, counts: Sequence[int]) -> None:
        """Fill the slots of newly verified tokens, and propose the next one of who decodes.

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
        asked = [requests[i] for i in live]
        chosen = self._choose(last, asked, [len(r.tokens) for r in asked])
        for request, token, state in zip(asked, chosen, self.draft.feedback(last), strict=True):
            request.first_draft, request.feedback = token, state

    def _segment(self, row: int, request: Request, count: int, offset: int) -> Segment:
        return Segment(row, count, request.table, request.num_held + offset, self._device)

    def _run(self, tokens: Tensor, states: Tensor, segments: Sequence[Segment]) -> Tensor:
        """tokens [R], states [R,H] -> [R,H], before the final norm."""
        positions = pad_rows(torch.cat([s.positions for s in segments]))[None]
        context = PackedContext(self.store, segments, self.draft.config.sliding_window)
        embedded = self.draft.embed(pad_rows(tokens)[None])
        hidden = self.draft(embedded, pad_rows(states)[None], positions, context)
        return hidden[0, : len(tokens)]

    def _choose(
        self, hidden: Tensor, requests: Sequence[Request], positions: Sequence[int]
    ) -> list[int]:
        """The target id that each row [R,H] proposes for the given position."""
        logits = self.draft.logits(pad_rows(hidden))[: len(hidden)]
        chosen = logits.argmax(-1)
        for row, (request, position) in enumerate(zip(requests, positions, strict=True)):
            if not request.params.is_greedy:
                # The coin that will choose the target's own token there: where draft and target
                # agree in distribution they agree in the token.
                chosen[row] = choose(logits[row, None], request.params, [request.coin(position)])
        return self.draft.to_target_ids(chosen).tolist()
