"""verify, kernel against reference: the same coins pick the same tokens under all parameters.

fp32 against fp64: a coin may fall between two cumulative sums that differ in their last bits. The
seeds here are fixed, and no coin of theirs does.
"""

import itertools

import pytest
import torch

from eagle3_core.tree import ancestor_mask
from eagle3_serve.ops.verify import Processing
from eagle3_serve.ops.verify import reference as plain
from eagle3_serve.ops.verify import triton as fused

NODES, DEPTH = 7, 3
PARENTS = [-1, 0, 0, 1, 1, 3, -1]  # two children, two grandchildren, one below; padding at the end


def a_batch(batch: int, vocab: int, seed: int, dtype: torch.dtype = torch.float32):
    """Logits, a tree whose nodes are likely to be walked, coins."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(batch, NODES, vocab, generator=generator)).to(dtype)
    tokens = torch.zeros(batch, NODES, dtype=torch.int64)
    parents = torch.tensor(PARENTS).repeat(batch, 1)
    for b, node in itertools.product(range(batch), range(1, NODES)):
        parent = max(PARENTS[node], 0)
        rank = [n for n in range(1, node) if PARENTS[n] == PARENTS[node]]
        tokens[b, node] = logits[b, parent].topk(NODES).indices[len(rank)]
    coins = torch.rand(batch, DEPTH + 1, generator=generator)
    return logits, tokens, parents, coins, generator


def parameters(batch: int, **values: float) -> Processing:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | values
    return Processing(
        temperature=torch.full((batch,), float(defaults["temperature"])),
        top_k=torch.full((batch,), int(defaults["top_k"]), dtype=torch.int32),
        top_p=torch.full((batch,), float(defaults["top_p"])),
        min_p=torch.full((batch,), float(defaults["min_p"])),
    )


def assert_same(arguments: tuple, how: Processing) -> int:
    """Kernel and reference agree; how many nodes were accepted."""
    found = fused.verify(*arguments, how, DEPTH)
    expected = plain.verify(*arguments, how, DEPTH)
    assert torch.equal(found.num_accepted, expected.num_accepted)
    assert torch.equal(found.path, expected.path)
    assert torch.equal(found.token_ids, expected.token_ids)
    # fp32 sums of up to some thousand exponentials.
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-4, atol=1e-4)
    return int(found.num_accepted.sum())


@pytest.mark.parametrize("vocab", [50, 1500])
@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.4},
        {"top_k": 1},
        {"top_k": 5, "temperature": 0.8},
        {"top_k": 4000},
        {"top_p": 0.9},
        {"top_p": 0.3, "temperature": 0.6},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
    ],
)
def test_equals_the_reference(vocab: int, values: dict[str, float]):
    *arguments, _ = a_batch(2, vocab, seed=vocab)
    assert_same(tuple(arguments), parameters(2, **values))


def test_walks_are_long_enough_to_tell():
    *arguments, _ = a_batch(6, 300, seed=5)
    assert assert_same(tuple(arguments), parameters(6, temperature=0)) >= 12
    assert assert_same(tuple(arguments), parameters(6, temperature=0.5)) >= 3


def test_bias_penalties_and_mask_count_the_tokens_of_each_nodes_own_path():
    batch, vocab = 4, 70
    *arguments, generator = a_batch(batch, vocab, seed=11)
    how = parameters(batch, temperature=0.9)._replace(
        bias=torch.randn(batch, vocab, generator=generator),
        penalties=torch.tensor([[1.3, 0.5, 0.25]]).repeat(batch, 1),
        counts=torch.randint(3, (batch, vocab), generator=generator, dtype=torch.int32),
        in_prompt=torch.rand(batch, vocab, generator=generator) < 0.3,
        mask=torch.randint(
            -(2**31), 2**31, (batch, NODES, 3), generator=generator, dtype=torch.int64
        ).int(),
    )
    assert_same(tuple(arguments), how)
    assert_same(tuple(arguments), how._replace(temperature=torch.zeros(batch)))
    assert_same(tuple(arguments), how._replace(top_p=torch.full((batch,), 0.7)))
    # The reference counts a path through its ancestors: root left out, the node itself included.
    assert ancestor_mask(arguments[2][:1])[0, 5].nonzero().flatten().tolist() == [0, 1, 3, 5]


def test_of_equal_logits_the_lowest_ids_are_kept():
    logits = torch.zeros(1, NODES, 40)
    logits[..., 30:] = 1.0
    tokens = torch.zeros(1, NODES, dtype=torch.int64)
    parents = torch.tensor([PARENTS])
    for coin, values, token in (
        (0.99, {"top_k": 3}, 32),
        # Ten of weight 1, and of thirty of 1/e the two lowest: .034 each of all that is kept.
        (0.0, {"top_k": 12}, 0),
        (0.05, {"top_k": 12}, 1),
        (0.08, {"top_k": 12}, 30),
        (0.99, {"top_k": 12}, 39),
        (0.99, {"temperature": 0}, 30),
    ):
        how = parameters(1, **values)
        found = fused.verify(logits, tokens, parents, torch.full((1, 4), coin), how, DEPTH)
        assert found.token_ids[0, 0] == token, (coin, values)


def test_bf16_logits_and_no_request_at_all():
    *arguments, _ = a_batch(2, 1200, seed=3, dtype=torch.bfloat16)
    assert_same(tuple(arguments), parameters(2, top_p=0.9))
    *arguments, _ = a_batch(0, 40, seed=3)
    assert_same(tuple(arguments), parameters(0))
