"""The unroll, its loss and every gradient equal a double loop over (slot, step) in float64.

The loop decodes every slot's chain by itself with the incremental `CacheContext`, the way an engine
does, and writes the supervision rule out token by token. Tolerances are float64 rounding over a few
hundred additions.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3_core import CacheContext, DraftConfig, Eagle3Draft
from eagle3_core.vocab import target_to_draft, vocab_map
from eagle3_train.objective import SOFT_CE, Objective
from eagle3_train.ops.head_loss import HeadLoss, head_loss
from eagle3_train.ops.head_loss import reference as head_loss_reference
from eagle3_train.ops.ttt_attention import reference as attention_reference
from eagle3_train.ttt import Batch, chain_slots, supervised_slots, unroll

V, T, H, STEPS = 40, 12, 16, 4


@dataclass
class Document:
    input_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    final: Tensor
    argmax: Tensor
    logz: Tensor


def make_draft(draft_vocab: int = 24, **choices: Any) -> Eagle3Draft:
    config = DraftConfig(
        hidden_size=H, intermediate_size=20, num_attention_heads=4, num_key_value_heads=2,
        head_dim=6, vocab_size=V, draft_vocab_size=draft_vocab, target_hidden_size=T,
        num_aux_hidden_states=3, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **choices,
    )  # fmt: skip
    draft = Eagle3Draft(config)
    draft.init_weights(torch.Generator().manual_seed(1), std=0.3)
    if config.is_pruned:
        kept = torch.randperm(V, generator=torch.Generator().manual_seed(2))[:draft_vocab]
        d2t, t2d = vocab_map(kept, V)
        draft.d2t.copy_(d2t)
        draft.t2d.copy_(t2d)
    return draft.double()


def make_documents(lengths: list[int], head: Tensor, seed: int = 0) -> list[Document]:
    g = torch.Generator().manual_seed(seed)
    documents = []
    for n in lengths:
        final = torch.randn(n, T, generator=g, dtype=torch.float64)
        documents.append(
            Document(
                input_ids=torch.randint(V, (n,), generator=g),
                loss_mask=torch.rand(n, generator=g) < 0.8,  # leaves gaps
                aux=torch.randn(n, 3 * T, generator=g, dtype=torch.float64),
                final=final,
                argmax=(final @ head.T).argmax(-1),
                logz=(final @ head.T).logsumexp(-1),
            )
        )
    return documents


def pack64(documents: list[Document]) -> Batch:
    batch = Batch.pack(documents)
    wide = {n: torch.cat([getattr(d, n) for d in documents]) for n in ("aux", "final", "logz")}
    return Batch(**{**vars(batch), **wide})


@dataclass
class Naive:
    """What the double loop finds, a row for each counted (document, slot, step)."""

    rows: list[tuple[int, int, int]]
    logits: Tensor  # [N,D] of the draft
    law: Tensor  # [N,V] of the target
    kept: Tensor  # [D] target ids

    def loss(self, objective: Objective) -> Tensor:
        """Sum over rows of 0.8^step x objective, every term by its definition over all of V."""
        q = torch.zeros_like(self.law).index_add(1, self.kept, self.logits.softmax(-1))
        within = self.law[:, self.kept]
        p = within / within.sum(-1, keepdim=True)
        log_q = self.logits.log_softmax(-1)
        ce, kl = -(p * log_q).sum(-1), (p * (p.log() - log_q)).sum(-1)
        tv = (q - self.law).abs().sum(-1) / 2
        share = torch.exp(-3 * (1 - tv)).detach()
        total = (
            objective.soft_ce * ce
            + objective.kl * kl
            + objective.tv * tv
            - objective.lk_alpha * torch.log(1 - tv)
            + objective.lk_lambda * (share * kl + (1 - share) * tv)
        )
        steps = torch.tensor([k for *_, k in self.rows], dtype=torch.float64)
        return (total * 0.8**steps).sum()


def naive(
    draft: Eagle3Draft, documents: list[Document], head: Tensor, steps: int, counts: Callable
) -> Naive:
    rows, logits, law = [], [], []
    for d, doc in enumerate(documents):
        n = len(doc.input_ids)
        e = draft.embed(doc.input_ids)
        x = draft.project(doc.aux[None])
        for t in range(n - 1):
            cache = CacheContext(draft.config.sliding_window)
            prefix = torch.arange(t + 1)
            h = draft(e[1 : t + 2][None], x[:, : t + 1], prefix[None], cache)[:, -1:]
            for k in range(steps):
                if t + 1 + k >= n:
                    break
                if k > 0:
                    at = torch.tensor([[t + k]])
                    h = draft(e[t + 1 + k][None, None], draft.feedback(h), at, cache)
                if counts(doc, t, k):
                    rows.append((d, t, k))
                    logits.append(draft.logits(h)[0, 0])
                    law.append((head @ doc.final[t + 1 + k]).softmax(-1))
    kept = draft.to_target_ids(torch.arange(draft.config.draft_vocab_size))
    return Naive(rows, torch.stack(logits), torch.stack(law), kept)


def strict(draft: Eagle3Draft) -> Callable[[Document, int, int], bool]:
    inverse = target_to_draft(draft.d2t, V) if draft.config.is_pruned else torch.arange(V)

    def counts(doc: Document, t: int, k: int) -> bool:
        if t + 2 + k >= len(doc.input_ids):
            return False
        tokens = all(bool(doc.loss_mask[t + 1 + i]) for i in range(k + 2))
        return tokens and bool(inverse[doc.argmax[t + 1 + k]] >= 0)

    return counts


def fused(
    draft: Eagle3Draft,
    batch: Batch,
    head: Tensor,
    slots: Tensor,
    objective: Objective = SOFT_CE,
    gradient_checkpointing: bool = False,
) -> tuple[HeadLoss, Tensor]:
    h = unroll(draft, batch, slots, gradient_checkpointing)
    normed = draft.ops.rms_norm(h, draft.norm.weight, draft.config.rms_norm_eps)
    step, slot = slots.nonzero().unbind(1)
    kept = draft.to_target_ids(torch.arange(draft.config.draft_vocab_size))
    result = head_loss(
        normed,
        draft.lm_head.weight,
        batch.final,
        head[kept],
        batch.logz,
        slot + 1 + step,
        0.8 ** step.double(),
        objective,
    )
    return result, slots.nonzero()


CHOICES = [
    {},
    {"draft_vocab": V},
    {"num_hidden_layers": 2},
    {"num_hidden_layers": 2, "layer_input": "every", "feedback": "post_norm"},
    {"num_hidden_layers": 3, "layer_input": "every", "residual": "normed", "aux_norm": "per_layer"},
    {"num_hidden_layers": 3, "aux_norm": "concat", "qk_norm": True, "attention_bias": True},
    {"feedback": "post_norm", "residual": "normed", "aux_norm": "concat_per_layer"},
    {"num_hidden_layers": 2, "sliding_window": 5},
    {"sliding_window": 2},  # shorter than the chain
]


OBJECTIVES = [*(Objective(**{f.name: 1.0}) for f in fields(Objective))]
OBJECTIVES.append(Objective(soft_ce=0.7, kl=0.2, tv=0.5, lk_alpha=0.3, lk_lambda=0.4))


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_losses_and_gradients_equal_the_double_loop(
    choices: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_reference, "BLOCK", 4)  # documents span several blocks
    monkeypatch.setattr(head_loss_reference, "CHUNK_ELEMENTS", 150)  # rows span many chunks
    draft = make_draft(**choices)
    head = torch.randn(V, T, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    documents = make_documents([11, 3, 1, 17, 2], head)
    batch = pack64(documents)
    parameters = dict(draft.named_parameters())
    expected = naive(draft, documents, head, STEPS, strict(draft))
    slots = supervised_slots(batch, STEPS, getattr(draft, "t2d", None), "strict")
    assert len(expected.rows) > 20

    for objective in OBJECTIVES:
        want = expected.loss(objective)
        wanted = torch.autograd.grad(want, list(parameters.values()), retain_graph=True)
        result, rows = fused(draft, batch, head, slots, objective)
        grads = torch.autograd.grad(result.total, list(parameters.values()))
        assert abs(float(result.total.detach() - want.detach())) < 1e-10, objective
        for name, grad, value in zip(parameters, grads, wanted, strict=True):
            assert value.abs().max() > 1e-6, f"{name} is not trained: nothing would be compared"
            torch.testing.assert_close(
                grad, value, rtol=1e-9, atol=1e-10, msg=f"{name} {objective}"
            )

    starts = [sum(len(d.input_ids) for d in documents[:i]) for i in range(len(documents))]
    drafted = expected.logits.argmax(-1).tolist()
    ids = {(k, starts[d] + t): i for (d, t, k), i in zip(expected.rows, drafted, strict=True)}
    pairs = zip(rows.tolist(), result.top1.tolist(), strict=True)
    assert {(k, t): token for (k, t), token in pairs} == ids


@pytest.mark.parametrize("choices", [CHOICES[3], CHOICES[7]], ids=str)
def test_recomputed_steps_give_the_same_gradients(choices: dict) -> None:
    draft = make_draft(**choices)
    head = torch.randn(V, T, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    batch = pack64(make_documents([9, 12], head))
    slots = supervised_slots(batch, STEPS, draft.t2d, "strict")
    kept, recomputed = (
        torch.autograd.grad(
            fused(draft, batch, head, slots, gradient_checkpointing=again)[0].total,
            list(draft.parameters()),
        )
        for again in (False, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))


def test_acceptance_of_a_row_without_gradient() -> None:
    """What evaluation reads: the overlap with the target's whole law, and nothing is trained."""
    draft = make_draft()
    head = torch.randn(V, T, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    documents = make_documents([12], head)
    batch = pack64(documents)
    with torch.no_grad():
        expected = naive(draft, documents, head, 1, strict(draft))
        slots = supervised_slots(batch, 1, draft.t2d, "strict")
        result = fused(draft, batch, head, slots)[0]
    overlap = torch.minimum(expected.logits.softmax(-1), expected.law[:, expected.kept]).sum(-1)
    torch.testing.assert_close(result.acceptance, overlap)


def test_acceptance_losses_stay_finite_where_nothing_overlaps() -> None:
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    head = torch.tensor([[400.0, 0.0], [-400.0, 0.0]])
    teacher_head = torch.tensor([[-400.0, 0.0], [400.0, 0.0]])
    for objective in OBJECTIVES:
        result = head_loss(
            hidden,
            head,
            torch.tensor([[1.0, 0.0]]),
            teacher_head,
            torch.tensor([400.0]),
            torch.tensor([0]),
            torch.ones(1),
            objective,
        )
        assert result.total.isfinite()
        assert torch.autograd.grad(result.total, hidden)[0].isfinite().all()


def test_frozen_head_gives_the_same_state_gradients() -> None:
    draft = make_draft()
    head = torch.randn(V, T, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    batch = pack64(make_documents([9, 12], head))
    slots = supervised_slots(batch, STEPS, draft.t2d, "strict")
    whole = torch.autograd.grad(fused(draft, batch, head, slots)[0].total, draft.fc.weight)[0]
    draft.lm_head.weight.requires_grad_(False)
    frozen = torch.autograd.grad(fused(draft, batch, head, slots)[0].total, draft.fc.weight)[0]
    assert torch.equal(whole, frozen)
    with torch.no_grad():
        assert fused(draft, batch, head, slots)[0].total > 0


def test_chain_slots_stop_at_gaps_and_at_the_end_of_the_document() -> None:
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    n = len(mask)
    document = Document(
        torch.zeros(n), mask, torch.zeros(n, 3), torch.zeros(n, 3), torch.zeros(n), torch.zeros(n)
    )
    batch = Batch.pack([document, document])
    slots = chain_slots(batch, 3)
    # Step 0 needs x[t+1] and x[t+2], step 1 also x[t+3], step 2 also x[t+4].
    one = torch.tensor([
        [0, 1, 1, 1, 0, 0, 1, 1, 0, 0],
        [0, 1, 1, 0, 0, 0, 1, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0, 0, 0, 0],
    ]).bool()  # fmt: skip
    assert torch.equal(slots, torch.cat([one, one], dim=1))


def test_only_live_slots_run_after_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = make_draft()
    sizes: list[int] = []
    forward = draft.forward
    monkeypatch.setattr(
        draft, "forward", lambda e, x, p, c: (sizes.append(x.shape[1]), forward(e, x, p, c))[1]
    )
    head = torch.randn(V, T, dtype=torch.float64)
    document = make_documents([20], head)[0]
    document.loss_mask[:] = torch.arange(20) >= 16
    batch = pack64([document])
    unroll(draft, batch, chain_slots(batch, 4))
    # Responses are tokens 16..19: slots 15, 16, 17 at step 0, then one fewer each step.
    assert sizes == [20, 2, 1]
