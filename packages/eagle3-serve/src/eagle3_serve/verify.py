"""Which tokens a round emits: the target's own choices, as far as the drafts foresaw them.

At every verified row the target's token is chosen exactly as plain decoding would choose it there:
the most likely one, or the one that the position's coin picks. The rows behind a draft count only
if the draft is that token. So what is emitted IS plain decoding, greedy or sampled, whatever
proposed the drafts; it has the target's distribution because each choice has. A draft x is accepted
with probability p(x) when it is deterministic, and with the overlap of draft and target
distribution along the coin when it is drawn with the same coin.
"""

from collections.abc import Sequence

from torch import Tensor

from eagle3_serve.processors import Paths
from eagle3_serve.sampling import choose
from eagle3_serve.scheduler import Request


def target_choices(
    logits: Tensor, requests: Sequence[Request], paths: Sequence[Paths]
) -> list[list[int]]:
    """The target's token after each row.

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
            out.append(_choices(logits[rows], request, own))
        first += len(own)
    return out


def _choices(logits: Tensor, request: Request, paths: Paths) -> list[int]:
    if request.processor is not None:
        logits = request.processor.process(logits, paths)
    # A row chooses the token behind its path, whose position has a coin of its own.
    coins = [request.coin(len(request.tokens) + len(path)) for path in paths]
    return choose(logits, request.params, coins).tolist()
