"""Which tokens a round emits: the target's own choices, as far as the drafts foresaw them.

At every verified row the target's token is chosen exactly as plain decoding would choose it there:
the most likely one, or the one that the position's coin picks. The rows behind a draft count only
if the draft is that token. So what is emitted IS plain decoding, greedy or sampled, whatever
proposed the drafts; it has the target's distribution because each choice has. A draft x is accepted
with probability p(x) when it is deterministic, and with the overlap of draft and target
distribution along the coin when it is drawn with the same coin.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle3_core.accept import greedy_chain
from eagle3_serve.sampling import choose
from eagle3_serve.scheduler import Request


def target_choices(
    logits: Tensor, requests: Sequence[Request], counts: Sequence[int]
) -> list[list[int]]:
    """The target's token after each row.

    Args:
        logits: [sum(counts),V], packed; a request's first row is that of its last token.
        requests: whose rows they are.
        counts: rows per request.
    """
    greedy = logits.argmax(-1).tolist()
    out, first = [], 0
    for request, count in zip(requests, counts, strict=True):
        rows = slice(first, first + count)
        if request.params.is_greedy:
            out.append(greedy[rows])
        else:
            coins = request.coins(len(request.tokens), count)
            out.append(choose(logits[rows], request.params, coins).tolist())
        first += count
    return out


def emitted(drafts: Sequence[Sequence[int]], choices: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each request's choices up to and including the first that differs from its draft.

    Args:
        drafts: the chain of each request, of any length.
        choices: one more for each request, from `target_choices`.
    """
    num_drafts = torch.tensor([len(chain) for chain in drafts])
    draft_ids = pad_sequence([torch.tensor(chain, dtype=torch.int64) for chain in drafts], True)
    target_ids = pad_sequence([torch.tensor(row) for row in choices], True)
    accepted = greedy_chain(draft_ids, target_ids, num_drafts).num_accepted.tolist()
    return [list(row[: count + 1]) for row, count in zip(choices, accepted, strict=True)]
