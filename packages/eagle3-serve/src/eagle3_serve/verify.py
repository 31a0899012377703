"""Which tokens a round emits: the target's own choices, as far as the drafts foresaw them.

At every verified row the target's token is chosen exactly as plain decoding would choose it there:
the most likely one, or the one that the position's coin picks. The rows behind a draft count only
if the draft is that token. So what is emitted IS plain decoding, greedy or sampled, whatever
proposed the drafts; it has the target's distribution because each choice has. A draft x is accepted
with probability p(x) when it is deterministic, and with the overlap of draft and target
distribution along the coin when it is drawn with the same coin.

Block verification accepts more of a sampled chain. Its text has the target's distribution too, but
which text a seed gives then depends on the draft and on K.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3_core.accept import block_chain
from eagle3_serve.processors import Paths
from eagle3_serve.proposal import Proposal
from eagle3_serve.sampling import choose, processed_probs
from eagle3_serve.scheduler import Request

_LOG = logging.getLogger(__name__)


class Emission(NamedTuple):
    """What a round gives a request."""

    tokens: list[int]  # accepted drafts, then one more
    path: list[int]  # verify rows from the root to the last accepted draft


def emissions(
    logits: Tensor, requests: Sequence[Request], proposals: Sequence[Proposal], d2t: Tensor | None
) -> list[Emission]:
    """What each request emits; a request that fails here says so in its `failure`.

    Args:
        logits: [R,V], packed; a request's first row is that of its last token.
        requests: whose rows they are.
        proposals: what they verify.
        d2t: [D] offsets to target ids, if the draft's vocabulary is pruned.
    """
    greedy = logits.argmax(-1).tolist()
    out, first = [], 0
    for request, proposal in zip(requests, proposals, strict=True):
        rows = slice(first, first + proposal.num_rows)
        first += proposal.num_rows
        try:
            if proposal.q is not None:
                out.append(_block(logits[rows], request, proposal, proposal.q, d2t))
                continue
            choices = greedy[rows]
            if request.processor is not None or not request.params.is_greedy:
                choices = _choices(logits[rows], request, proposal.paths)
            path = proposal.walk(choices)
            out.append(Emission([choices[row] for row in path], path))
        except Exception as error:  # one request's parameters must not stop the others
            _LOG.exception("request %s cannot go on", request.id)
            request.failure = str(error) or type(error).__name__
            out.append(Emission([greedy[rows][0]], [0]))
    return out


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's logprob where it was chosen, and the most likely tokens there."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # (token id, logprob), the most likely first


@dataclass(frozen=True)
class RoundTrace:
    """What a round drafted for a request, and what was kept of it."""

    token_ids: list[int]  # drafts; empty if there were none
    parents: list[int]  # the draft that each stands behind; -1 for the last certain token
    accepted: list[int]  # drafts that are part of the output, in its order

    @staticmethod
    def of(proposal: Proposal, rows: Sequence[int]) -> "RoundTrace":
        """`rows` are the verify rows of the drafts that were kept."""
        parents = [parent - 1 for parent in proposal.parents]
        return RoundTrace(list(proposal.tokens), parents, [row - 1 for row in rows])


def path_logprobs(
    logits: Tensor, request: Request, paths: Paths, token_ids: Sequence[int]
) -> list[TokenLogprobs]:
    """What the request's distribution says of the tokens it emits.

    The distribution before temperature and truncation, after everything that comes before them:
    the one whose most likely token greedy decoding takes.

    Args:
        logits: [R,V], a row for each token.
        request: as before these tokens.
        paths: of each row.
        token_ids: [R] chosen there.
    """
    rows = _processed(logits, request, paths).float().log_softmax(-1)
    chosen = rows.gather(1, torch.tensor(token_ids, device=rows.device)[:, None])[:, 0].tolist()
    top = rows.topk(min(request.params.logprobs or 0, rows.shape[1]))
    found = []
    for token, logprob, ids, values in zip(
        token_ids, chosen, top.indices.tolist(), top.values.tolist(), strict=True
    ):
        # A token that is barred has no logprob (JSON has no infinity).
        likely = [(i, v) for i, v in zip(ids, values, strict=True) if v > -torch.inf]
        found.append(TokenLogprobs(token, logprob, likely))
    return found


def _processed(logits: Tensor, request: Request, paths: Paths) -> Tensor:
    """[R,V] as the request's parameters and each row's path make them, before temperature."""
    if request.processor is None:
        return logits
    return request.processor.process(logits, paths)


def _choices(logits: Tensor, request: Request, paths: Paths) -> list[int]:
    logits = _processed(logits, request, paths)
    # A row chooses the token behind its path, whose position has a coin of its own.
    coins = [request.coin(len(request.tokens) + len(path)) for path in paths]
    return choose(logits, request.params, coins).tolist()


def _block(
    logits: Tensor, request: Request, proposal: Proposal, q: Tensor, d2t: Tensor | None
) -> Emission:
    """Block verification of a chain, with coins that only this round of the request has."""
    p = processed_probs(_processed(logits, request, proposal.paths), request.params)
    start = len(request.tokens)
    coins = [request.coin(start, f" accept {i}") for i in range(len(proposal.tokens))]
    final = request.coin(start, " final")
    accepted = block_chain(
        torch.tensor([proposal.draft_ids], device=p.device),
        q[None],
        p[None],
        torch.tensor([coins], dtype=torch.float64, device=p.device),
        torch.tensor([final], dtype=torch.float64, device=p.device),
        d2t,
    )
    count = int(accepted.num_accepted)
    return Emission([*proposal.tokens[:count], int(accepted.bonus)], list(range(count + 1)))
