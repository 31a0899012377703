"""Under its convention each peer's own loss, mask and gradients come out, from its own files.

The vectors were computed by SpecForge 0.2.0, speculators 0.9.0 and SafeAILab/EAGLE in float32; an
independent float64 computation lies within 4e-6 of their losses and 1e-5 of their gradients, which
is where the tolerances come from.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_core import Eagle3Draft, load_draft
from eagle3_train.config import LossConvention
from eagle3_train.distill import normaliser
from eagle3_train.objective import SOFT_CE
from eagle3_train.ops.head_loss import head_loss
from eagle3_train.ttt import Batch, supervised_slots, unroll

GOLDEN = Path(__file__).parents[1] / "core" / "golden"
STEPS, STEP_WEIGHT = 4, 0.8


def golden_draft(case: str, inputs: dict[str, Tensor]) -> Eagle3Draft:
    target = None
    if "target_embed_tokens" in inputs:
        vocab, hidden = inputs["target_embed_tokens"].shape
        target = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab, hidden_size=hidden, intermediate_size=16, num_hidden_layers=8,
                num_attention_heads=4,
            )
        )  # fmt: skip
        target.get_input_embeddings().weight.data.copy_(inputs["target_embed_tokens"])
    return load_draft(GOLDEN / case, target=target).draft


def teacher_of_logits(inputs: dict[str, Tensor], draft: Eagle3Draft) -> tuple[Batch, Tensor]:
    """Teacher logits as states of width V and an identity head."""
    rows = inputs["aux_hidden"].shape[1]
    samples: list[Any] = [
        SimpleNamespace(
            input_ids=inputs["tokens"][b, :rows],
            loss_mask=inputs["loss_mask"][b],
            aux=inputs["aux_hidden"][b],
            final=inputs["teacher_logits"][b],
            argmax=inputs["teacher_logits"][b].argmax(-1),
            logz=inputs["teacher_logits"][b].logsumexp(-1),
        )
        for b in range(len(inputs["tokens"]))
    ]
    kept = draft.to_target_ids(torch.arange(draft.config.draft_vocab_size))
    return Batch.pack(samples), torch.eye(draft.config.vocab_size)[kept]


def teacher_of_states(inputs: dict[str, Tensor], draft: Eagle3Draft) -> tuple[Batch, Tensor]:
    """speculators holds S + 1 tokens and teacher states, and S aux states."""
    rows = inputs["target_last_hidden"].shape[1]
    final = draft.ops.rms_norm(
        inputs["target_last_hidden"][0], inputs["target_norm_weight"], draft.config.rms_norm_eps
    )
    sample: Any = SimpleNamespace(
        input_ids=inputs["tokens"][0, :rows],
        loss_mask=inputs["loss_mask"][0],
        aux=torch.nn.functional.pad(inputs["aux_hidden"][0], (0, 0, 0, 1)),
        final=final,
        argmax=torch.zeros(rows, dtype=torch.int64),
        logz=torch.zeros(rows),  # asked by no soft cross-entropy
    )
    return Batch.pack([sample]), inputs["target_lm_head_draft_rows"]


CASES: list[tuple[str, LossConvention]] = [
    ("sf_base", "specforge"),
    ("sf_fc_norm", "specforge"),
    ("sf_target_hidden", "specforge"),
    ("sp_norm_before_residual", "speculators"),
    ("sp_norm_before_fc", "speculators"),
    ("sp_norm_output", "speculators"),
    ("sp_two_layer", "speculators"),
    ("ea_base", "eagle"),
]


@pytest.mark.parametrize(("case", "convention"), CASES)
def test_peer_loss_and_gradients(case: str, convention: LossConvention) -> None:
    inputs = load_file(GOLDEN / case / "inputs.safetensors")
    expected = load_file(GOLDEN / case / "expected.safetensors")
    draft = golden_draft(case, inputs)
    draft.embed_tokens.requires_grad_(False)
    draft.lm_head.requires_grad_(convention != "speculators")
    teacher_of = teacher_of_states if convention == "speculators" else teacher_of_logits
    batch, teacher_head = teacher_of(inputs, draft)

    slots = supervised_slots(batch, STEPS, draft.t2d, convention)
    wanted = expected["loss_mask_steps"].bool()  # [K,B,S]
    extra = len(batch) - wanted[0].numel()
    assert extra == (1 if convention == "speculators" else 0)
    assert torch.equal(slots[:, : len(batch) - extra], wanted.flatten(1))
    assert not slots[:, len(batch) - extra :].any()

    divisor = normaliser(convention, slots.sum(1).double(), wanted[0].numel())
    step, slot = slots.nonzero().unbind(1)
    weight = (STEP_WEIGHT ** torch.arange(STEPS) / divisor)[step].float()
    hidden = unroll(draft, batch, slots)
    normed = draft.ops.rms_norm(hidden, draft.norm.weight, draft.config.rms_norm_eps)
    result = head_loss(
        normed,
        draft.lm_head.weight,
        batch.final,
        teacher_head,
        batch.logz,
        slot + 1 + step,
        weight,
        SOFT_CE,
    )
    per_row = result.cross_entropy
    if convention == "speculators":
        per_row = per_row - result.entropy  # a KL; the gradient is the same
    per_step = torch.zeros(STEPS).index_add(0, step, per_row) / divisor
    torch.testing.assert_close(per_step.float(), expected["loss_per_step"], rtol=0, atol=1e-5)
    total = (per_row * weight).sum()
    torch.testing.assert_close(total, expected["loss_total"], rtol=0, atol=1e-5)

    result.total.backward()
    grads = {n: p.grad for n, p in draft.named_parameters() if p.grad is not None}
    checked = 0
    for key, value in expected.items():
        kind, _, name = key.partition(".")
        if kind not in ("grad", "grad_norm"):
            continue
        grad = grads[name.replace("midlayer", "layers.0")]
        found = grad if kind == "grad" else grad.norm()
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5, msg=key)
        checked += 1
    assert checked > len(grads)  # a norm of each, and some in full
