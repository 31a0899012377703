"""The training-time-test unroll (EAGLE-3, section 3.2) over packed documents, slot by slot.

S slots in one packed row, K steps. At step k slot t embeds token x[t+1+k], takes the state fed back
from step k-1, stands at position t+k and predicts x[t+2+k]; its teacher is the state at t+1+k.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eagle3_core import AttentionContext, Eagle3Draft, SplitEmbeddings
from eagle3_train.attention import PackedUnroll
from eagle3_train.config import LossConvention
from eagle3_train.store import Sample


@dataclass(frozen=True)
class Batch:
    """Documents laid end to end; positions count within each."""

    input_ids: Tensor  # [S] int64
    loss_mask: Tensor  # [S] bool
    aux: Tensor  # [S,A·T]
    final: Tensor  # [S,T]
    argmax: Tensor  # [S] int64
    logz: Tensor  # [S]
    position_ids: Tensor  # [S] int64
    remaining: Tensor  # [S] int64: tokens of the document that follow
    lengths: tuple[int, ...]

    @classmethod
    def pack(cls, samples: Sequence[Sample]) -> "Batch":
        """Concatenate samples; states become float32."""
        lengths = tuple(len(s.input_ids) for s in samples)
        positions = torch.cat([torch.arange(n) for n in lengths])
        ends = torch.cat([torch.full((n,), n - 1) for n in lengths])
        return cls(
            input_ids=torch.cat([s.input_ids for s in samples]).long(),
            loss_mask=torch.cat([s.loss_mask for s in samples]).bool(),
            aux=torch.cat([s.aux for s in samples]).float(),
            final=torch.cat([s.final for s in samples]).float(),
            argmax=torch.cat([s.argmax for s in samples]).long(),
            logz=torch.cat([s.logz for s in samples]).float(),
            position_ids=positions,
            remaining=ends - positions,
            lengths=lengths,
        )

    def __len__(self) -> int:
        return len(self.input_ids)

    def to(self, device: torch.device) -> "Batch":
        """Move the states; what decides which slots run stays on the CPU."""
        return replace(
            self,
            aux=self.aux.to(device, non_blocking=True),
            final=self.final.to(device, non_blocking=True),
        )

    def pinned(self) -> "Batch":
        """States in pinned memory, from which a CUDA device reads while it computes."""
        return replace(self, aux=self.aux.pin_memory(), final=self.final.pin_memory())

    def ahead(self, values: Tensor, by: int) -> Tensor:
        """[S] -> [S]: the value `by` slots later; `remaining` must mask what crosses a document."""
        return values[(torch.arange(len(self)) + by).clamp_(max=len(self) - 1)]


def chain_slots(batch: Batch, steps: int) -> Tensor:
    """[K,S] bool: inputs x[t+1..t+1+k] and predicted x[t+2+k] are responses of one document."""
    rows, inputs = [], torch.ones(len(batch), dtype=torch.bool)
    for k in range(steps):
        inputs = inputs & batch.ahead(batch.loss_mask, 1 + k)
        rows.append(inputs & batch.ahead(batch.loss_mask, 2 + k) & (batch.remaining >= 2 + k))
    return torch.stack(rows)


def supervised_slots(
    batch: Batch, steps: int, t2d: Tensor | None, convention: LossConvention
) -> Tensor:
    """[K,S] bool: the slots whose loss counts at each step.

    strict: `chain_slots`, and the target's argmax can be drafted (`t2d` [V] bool; none = unpruned).
    specforge, eagle: x[t+k] is a response and the argmax can be drafted (unshifted mask,
    SpecForge #885). speculators: x[t+1+k] is a response, whatever the argmax.
    """
    if convention == "strict":
        slots = chain_slots(batch, steps)
    else:
        shift = 1 if convention == "speculators" else 0
        slots = torch.stack([
            batch.ahead(batch.loss_mask, shift + k) & (batch.remaining >= 1 + k)
            for k in range(steps)
        ])  # fmt: skip
    if t2d is None or convention == "speculators":
        return slots
    drafted = t2d.cpu()[batch.argmax]
    return slots & torch.stack([batch.ahead(drafted, 1 + k) for k in range(steps)])


def unroll(
    draft: Eagle3Draft, batch: Batch, slots: Tensor, gradient_checkpointing: bool = False
) -> Tensor:
    """Run the draft over `slots` [K,S] bool; a slot runs at step k while it counts at k or later.

    `gradient_checkpointing` keeps each step's input and keys alone, and runs it twice.

    Returns:
        [N,H] states before the final norm, in the order of `slots.nonzero()`.
    """
    device = batch.aux.device
    running = slots.flip(0).cummax(0).values.flip(0)
    keys = PackedUnroll(batch.lengths, draft.config.sliding_window)
    # All steps see the same tokens, one further each step.
    split = draft.split_embeddings(draft.embed(batch.input_ids.to(device)[None]))
    x = draft.project(batch.aux[None])
    # All slots at step 0: later ones see their keys.
    at, kept, states = torch.arange(len(batch)), None, []
    for k in range(len(slots)):
        if k > 0:
            kept = running[k][at]
            at = at[kept]
            if not len(at):
                break
            x = x[:, kept.to(device)]
        tokens = (at + 1 + k).clamp(max=len(batch) - 1).to(device)
        positions = batch.position_ids[at][None].to(device) + k
        step = partial(_step, draft, split, tokens, positions, keys.step(at, kept, device))
        h = checkpoint(step, x, use_reentrant=False) if gradient_checkpointing else step(x)
        assert isinstance(h, Tensor)
        states.append(h[0, slots[k][at].to(device)])
        x = draft.feedback(h)
    return torch.cat(states)


def _step(
    draft: Eagle3Draft,
    split: SplitEmbeddings,
    tokens: Tensor,
    positions: Tensor,
    context: AttentionContext,
    x: Tensor,
) -> Tensor:
    return draft(split.at(tokens), x, positions, context)
