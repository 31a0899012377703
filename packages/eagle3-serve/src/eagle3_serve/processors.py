"""What a request's parameters and its own tokens make of the target's logits.

A verify row stands behind tokens that are only drafted. Whatever counts tokens has to count those
of the row's own path too, or the row differs from the one that plain decoding would see there. So
a processor knows the certain tokens, and is handed the rest of each row's context: its path.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from eagle3_serve.constraints import Constraint
from eagle3_serve.sampling import SamplingParams

Paths = Sequence[Sequence[int]]  # per row: the drafted tokens between the certain ones and it


class LogitsProcessor:
    """One request's changes to logits: everything that comes before temperature.

    In the order of transformers and vLLM: logit_bias; repetition_penalty over prompt and output;
    frequency_penalty and presence_penalty over the output (OpenAI's formula); no end token within
    the first `min_tokens`; nothing that the grammar does not allow.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        end_ids: Collection[int],
        vocab_size: int,
        device: torch.device,
        constraint: Constraint | None = None,
    ) -> None:
        """Start in front of the output.

        Args:
            params: of the request.
            prompt_ids: of the request.
            end_ids: the tokens that end its output; some targets name ids they do not have.
            vocab_size: V.
            device: of the logits.
            constraint: its grammar; whoever reads the output token by token moves it on.
        """
        self._params = params
        self._constraint = constraint
        self._num_output = 0
        self._end_ids = torch.tensor(
            [i for i in end_ids if i < vocab_size], dtype=torch.int64, device=device
        )
        ids, values = zip(*params.logit_bias, strict=True) if params.logit_bias else ((), ())
        self._biased = torch.tensor(ids, dtype=torch.int64, device=device)
        self._bias = torch.tensor(values, dtype=torch.float32, device=device)
        self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._in_prompt[torch.tensor(prompt_ids, dtype=torch.int64, device=device)] = True
        self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)

    def process(self, logits: Tensor, paths: Paths) -> Tensor:
        """Logits [R,V] of R rows, each behind its own path -> new fp32 logits [R,V]."""
        params = self._params
        logits = logits.to(torch.float32, copy=True)
        if params.logit_bias:
            logits[:, self._biased] += self._bias
        if params.has_penalties:
            self._penalize(logits, paths)
        if params.min_tokens:
            left = params.min_tokens - self._num_output
            short = torch.tensor([len(path) < left for path in paths], device=logits.device)
            ends = logits[:, self._end_ids].masked_fill(short[:, None], -torch.inf)
            logits[:, self._end_ids] = ends
        if self._constraint is not None:
            self._constraint.mask(logits, paths)
        return logits

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens of the output are now certain."""
        self._num_output += len(token_ids)
        if self._params.has_penalties:
            self._counts += _counts([token_ids], self._counts)[0]

    def _penalize(self, logits: Tensor, paths: Paths) -> None:
        params = self._params
        counts = self._counts + _counts(paths, self._counts)
        if params.repetition_penalty != 1:
            seen = (counts > 0) | self._in_prompt
            penalty = params.repetition_penalty
            lower = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits.copy_(torch.where(seen, lower, logits))
        logits -= params.frequency_penalty * counts
        logits -= params.presence_penalty * (counts > 0)


def needs_processor(params: SamplingParams) -> bool:
    """Whether any parameter changes logits before temperature."""
    changes = params.logit_bias or params.has_penalties or params.min_tokens
    return bool(changes) or params.grammar is not None


def _counts(paths: Paths, like: Tensor) -> Tensor:
    """[R,V]: how often each token is on each path."""
    counts = like.new_zeros(len(paths), len(like))
    for row, path in zip(counts, paths, strict=True):
        ids = torch.tensor(path, dtype=torch.int64, device=like.device)
        row.index_add_(0, ids, torch.ones_like(ids, dtype=like.dtype))
    return counts
