"""draft_head against its reference, including ties, odd sizes and a quantised head."""

import pytest
import torch

from eagle3_serve.ops.draft_head import reference as plain
from eagle3_serve.ops.draft_head import triton as fused
from eagle3_serve.ops.draft_head.quantise import quantised_head

EPS = 1e-5


def inputs(rows: int, hidden: int, vocab: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(rows + vocab)
    h = torch.randn(rows, hidden, generator=generator).to(dtype)
    weight = torch.rand(hidden, generator=generator).to(dtype) + 0.5
    head = torch.randn(vocab, hidden, generator=generator).to(dtype)
    d2t = torch.arange(vocab) * 2
    return h, weight, EPS, head, d2t


@pytest.mark.parametrize(
    ("rows", "hidden", "vocab", "k"),
    [(1, 32, 100, 1), (3, 48, 200, 4), (17, 33, 65, 16), (2, 130, 64, 3), (0, 16, 32, 2)],
)
@pytest.mark.parametrize("pruned", [True, False])
def test_equals_the_reference(rows: int, hidden: int, vocab: int, k: int, pruned: bool):
    h, weight, eps, head, d2t = inputs(rows, hidden, vocab, torch.float32)
    arguments = (h, weight, eps, head, k, d2t if pruned else None)
    found, expected = fused.draft_head(*arguments), plain.draft_head(*arguments)
    assert torch.equal(found.draft_ids, expected.draft_ids)
    assert torch.equal(found.token_ids, expected.token_ids)
    # fp32 dot products of some hundred terms in two orders of summation.
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_fp32_sums(dtype: torch.dtype):
    h, weight, eps, head, _ = inputs(5, 64, 300, dtype)
    found = fused.draft_head(h, weight, eps, head, 4)
    normed = plain.TorchOps().rms_norm(h, weight, eps)
    logits = normed.double() @ head.double().T
    exact = logits.log_softmax(-1)
    # The norm may round one value of a row to its other neighbour: 2^-8 of one of 64 products.
    torch.testing.assert_close(
        found.log_probs.double(), exact.gather(1, found.draft_ids), rtol=0, atol=0.05
    )
    best = exact.topk(4).values
    torch.testing.assert_close(exact.gather(1, found.draft_ids), best, rtol=0, atol=0.05)


def test_of_equal_logits_the_lowest_id_comes_first():
    hidden, vocab = 16, 200
    head = torch.zeros(vocab, hidden)
    head[[3, 70, 71, 199]] = 1.0  # four equal rows in three tiles; all others are equal too
    h, weight = torch.ones(2, hidden), torch.ones(hidden)
    for module in (plain, fused):
        found = module.draft_head(h, weight, EPS, head, 6)
        assert found.draft_ids.tolist() == [[3, 70, 71, 199, 0, 1]] * 2


def test_a_quantised_head_proposes_what_its_own_values_say():
    h, weight, eps, head, d2t = inputs(3, 64, 150, torch.float32)
    codes, scale = quantised_head(head)
    arguments = (h, weight, eps, codes, 3, d2t, scale)
    found, expected = fused.draft_head(*arguments), plain.draft_head(*arguments)
    assert torch.equal(found.token_ids, expected.token_ids)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-5, atol=1e-4)
    # e4m3 has three bits behind the point: half a step is 1/16 of a value.
    restored = codes.float() * scale[:, None]
    torch.testing.assert_close(restored, head, rtol=1 / 16, atol=float(scale.max()) * 2**-9)
