"""Which tokens a round emits: the target's own choices, as far as the drafts foresaw them.

At every verified row the target's token is chosen exactly as plain decoding would choose it there:
the most likely one, or the one that the position's coin picks. The rows behind a draft count only
if the draft is that token. So what is emitted IS plain decoding, greedy or sampled, whatever
proposed the drafts; it has the target's distribution because each choice has. A draft x is accepted
with probability p(x) when it is deterministic, and with the overlap of draft and target
distribution along the coin when it is drawn with the same coin.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_serve.processors import Paths
from eagle3_serve.proposal import Proposal
from eagle3_serve.sampling import choose
from eagle3_serve.scheduler import Request

_LOG = logging.getLogger(__name__)


def target_choices(
    logits: Tensor, requests: Sequence[Request], paths: Sequence[Paths]
) -> list[list[int]]:
    """The target's token after each row; a request that fails here says so in its `failure`.

    Args:
        logits: [R,V], packed; a request's first row is that of its last token.
        requests: whose rows they are.
        paths: for each request the path of each of its rows: the drafted tokens between its last
            token and the row, the row's own included.
    """
    greedy = logits.argmax(-1).tolist()
    out, first = [], 0
    for request, own in zip(requests, paths, strict=True):
        rows = slice(first, first + len(own))
        if request.processor is None and request.params.is_greedy:
            out.append(greedy[rows])
        else:
            try:
                out.append(_choices(logits[rows], request, own))
            except Exception as error:  # one request's parameters must not stop the others
                _LOG.exception("request %s cannot go on", request.id)
                request.failure = str(error) or type(error).__name__
                out.append(greedy[rows])
        first += len(own)
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
    if request.processor is not None:
        logits = request.processor.process(logits, paths)
    rows = logits.float().log_softmax(-1)
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


def _choices(logits: Tensor, request: Request, paths: Paths) -> list[int]:
    if request.processor is not None:
        logits = request.processor.process(logits, paths)
    # A row chooses the token behind its path, whose position has a coin of its own.
    coins = [request.coin(len(request.tokens) + len(path)) for path in paths]
    return choose(logits, request.params, coins).tolist()
