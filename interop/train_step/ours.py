"""One training step of eagle3_train, as its trainer runs it."""

from collections.abc import Callable

import torch
from case import EPS, ROPE, STEP_WEIGHT, Case
from torch import Tensor

from eagle3_core import DraftConfig, Eagle3Draft
from eagle3_train.config import LossConvention
from eagle3_train.evaluate import run_slots
from eagle3_train.store import Sample
from eagle3_train.trainer import normaliser
from eagle3_train.ttt import Batch, supervised_slots


def build(case: Case, convention: LossConvention) -> Callable[[], Tensor]:
    """A function that runs forward and backward and returns the loss."""
    config = DraftConfig(
        **case.sizes,
        target_hidden_size=case.sizes["hidden_size"],
        num_aux_hidden_states=3,
        rms_norm_eps=EPS,
        rope_parameters=ROPE,
    )
    draft = Eagle3Draft(config)
    draft.load_state_dict(case.weights)
    draft.to(case.device)
    draft.embed_tokens.requires_grad_(False)
    draft.lm_head.requires_grad_(convention != "speculators")
    teacher_head = case.head[draft.t2d]
    ids, mask, argmax = case.ids.cpu(), case.loss_mask.cpu(), case.argmax.cpu()
    sample = Sample(ids, mask, case.aux, case.final, argmax, case.logz)
    dtype = "float32" if case.dtype == torch.float32 else "bfloat16"

    def step() -> Tensor:
        batch = Batch.pack([sample]).to(case.device)
        slots = supervised_slots(batch, case.ttt_length, draft.t2d, convention)
        divisor = normaliser(convention, slots.sum(1).double(), len(batch))
        weights = (STEP_WEIGHT ** torch.arange(case.ttt_length) / divisor).float()
        draft.zero_grad(set_to_none=True)
        result, counts = run_slots(draft, batch, slots, teacher_head, weights, dtype)
        result.total.backward()
        if convention != "speculators":
            return result.total.detach()
        # Its loss is a divergence: the same gradient, less the teacher's entropy.
        return result.total.detach() - (counts["entropy"] * weights).sum()

    return step
