"""Draft trees: the reference implementation's own, and a plain-Python twin over random ones."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_core import CacheContext, DraftConfig, Eagle3Draft, load_draft
from eagle3_core.accept import greedy_tree
from eagle3_core.attention import TreeContext
from eagle3_core.tree import (
    DraftTree,
    Frontier,
    TreeShape,
    ancestor_mask,
    ancestor_words,
    draft_tree,
    grow_tree,
    root_paths,
    top,
)

GOLDEN = Path(__file__).parent / "golden" / "ea_base"


def golden_draft() -> tuple[Eagle3Draft, dict[str, Tensor], dict[str, Tensor]]:
    inputs = load_file(GOLDEN / "inputs.safetensors")
    vocab, hidden = inputs["target_embed_tokens"].shape
    sizes = {"intermediate_size": 8, "num_hidden_layers": 8, "num_attention_heads": 4}
    target = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, hidden_size=hidden, **sizes))
    target.get_input_embeddings().weight.data.copy_(inputs["target_embed_tokens"])
    return (
        load_draft(GOLDEN, target=target).draft,
        inputs,
        load_file(GOLDEN / "expected.safetensors"),
    )


def propose(
    draft: Eagle3Draft, cache: CacheContext, aux: Tensor, ids: Tensor, shape: TreeShape
) -> DraftTree:
    """Run the slots of `aux` [1,S,A·T] behind the cache, and draw a tree there; ids [1,S]."""
    positions = torch.arange(cache.length, cache.length + ids.shape[1])[None]
    h = draft(draft.embed(ids), draft.project(aux), positions, cache)[:, -1]
    return draft_tree(draft, ids[:, -1], h, positions[:, -1], TreeContext(cache), shape)


@torch.no_grad()
@pytest.mark.parametrize("prompt", [0, 1])
def test_the_reference_implementations_trees(prompt: int) -> None:
    """Two rounds of SafeAILab/EAGLE: topk 4, 12 nodes, depth 3 there = 4 drafted tokens here."""
    draft, inputs, expected = golden_draft()
    cache, shape = CacheContext(), TreeShape(4, 4, 12)
    aux, ids = inputs[f"prompt{prompt}.aux_hidden"], inputs[f"prompt{prompt}.input_ids"]
    for number in (1, 2):
        tree = propose(draft, cache, aux, ids[:, 1:], shape)
        case = f"k4_d3_n12.prompt{prompt}.round{number}"
        mask = ancestor_mask(tree.parents)
        assert torch.equal(tree.tokens[0], expected[f"{case}.draft_tokens"])
        assert torch.equal(tree.depths[0], expected[f"{case}.tree_position_ids"])
        assert torch.equal(mask[0].byte(), expected[f"{case}.tree_mask"])
        paths = expected[f"{case}.retrieve_indices"]
        assert torch.equal(root_paths(tree.parents, paths.shape[1] - 1)[0], paths)
        # Round 2: the draft reads the target's states of what was accepted, then drafts again.
        held = ids.shape[1]
        ids = inputs[f"k4_d3_n12.prompt{prompt}.round2.input_ids"]
        aux = inputs[f"prompt{prompt}.round2_aux_hidden"][:, : ids.shape[1] - held]
        ids = ids[:, held - 1 :]


Node = tuple[int, ...]
Table = dict[Node, Tensor]


def random_table(rng: random.Random, size: int, depth: int) -> Table:
    """A row of logits for every context: whole numbers from few rows, so that ties are common."""
    pool = [torch.tensor([float(rng.randint(-2, 2)) for _ in range(size)]) for _ in range(3)]
    nodes = (n for i in range(depth) for n in itertools.product(range(size), repeat=i))
    return {node: rng.choice(pool) for node in nodes}


def twin(table: Table, shape: TreeShape) -> dict[Node, float]:
    """The tree in plain Python: its nodes in the order they were scored in, with their scores."""

    def best(scores: dict[Node, float], k: int) -> list[Node]:
        return sorted(scores, key=lambda node: -scores[node])[:k]  # stable: the first of equals

    scored, frontier = {(): 0.0}, [()]
    for _ in range(shape.num_speculative_tokens):
        level: dict[Node, float] = {}
        for node in frontier:
            row = table[node] - table[node].logsumexp(0)
            for token in row.sort(descending=True, stable=True).indices[: shape.topk].tolist():
                level[(*node, token)] = float(row[token] + torch.tensor(scored[node]))
        frontier = best(level, shape.topk)
        scored |= level
    kept = {(), *best({n: s for n, s in scored.items() if n}, shape.num_nodes - 1)}
    return {node: score for node, score in scored.items() if node in kept}


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.integers(2, 4), st.data())
def test_against_the_twin(seed: int, depth: int, topk: int, size: int, data: st.DataObject) -> None:
    """Batched, with ties everywhere, pruned, and with fewer tokens than topk."""
    shape = TreeShape(depth, topk, data.draw(st.integers(2, TreeShape(depth, topk).limit)))
    rng = random.Random(seed)
    tables = [random_table(rng, size, depth) for _ in range(3)]
    image = sorted(rng.sample(range(9), size))
    d2t = torch.tensor(image) - torch.arange(size)
    rows: list[list[Node]] = [[()] for _ in tables]

    def expand(frontier: Frontier) -> Tensor:
        for b, (above, tokens) in enumerate(
            zip(frontier.parent_rows.tolist(), frontier.tokens.tolist(), strict=True)
        ):
            nodes = [(*rows[b][a], image.index(t)) for a, t in zip(above, tokens, strict=True)]
            lineage = frontier.lineage[b].tolist()
            assert [path[-1] for path in lineage] == list(range(len(nodes)))
            assert [path[:-1] for path in lineage] == [above_of[b][a] for a in above]
            rows[b], above_of[b] = nodes, lineage
        return torch.stack(
            [torch.stack([t[n] for n in r]) for t, r in zip(tables, rows, strict=True)]
        )

    above_of: list[list[list[int]]] = [[[]] for _ in tables]
    roots = torch.tensor([7, 8, 9])
    first = torch.stack([table[()] for table in tables])
    tree = grow_tree(roots, first, expand, shape, d2t)
    assert torch.equal(tree.tokens[:, 0], roots)
    for b, table in enumerate(tables):
        nodes: list[Node] = [()]
        for parent, token in zip(
            tree.parents[b, 1:].tolist(), tree.tokens[b, 1:].tolist(), strict=True
        ):
            nodes.append((*nodes[parent], image.index(token)))
        expected = twin(table, shape)
        assert nodes == list(expected)
        assert tree.scores[b].tolist() == list(expected.values())
        assert tree.depths[b].tolist() == [len(node) for node in nodes]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 1), "num_speculative_tokens is 0"),
        ((3, 0), "topk is 0"),
        ((3, 1, 5), r"num_verify_tokens is 5, expected 2\.\.4"),
        ((2, 3, 1), r"num_verify_tokens is 1, expected 2\.\.13"),
    ],
)
def test_shapes_that_no_tree_has(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeShape(*shape)


def test_a_chain_is_the_tree_of_one_child() -> None:
    """Its nodes are the argmaxes, one below the other."""
    draft, inputs, _ = golden_draft()
    with torch.no_grad():
        ids = inputs["prompt0.input_ids"][:, 1:]
        tree = propose(draft, CacheContext(), inputs["prompt0.aux_hidden"], ids, TreeShape(5))
        cache, x = CacheContext(), draft.project(inputs["prompt0.aux_hidden"])
        positions = torch.arange(ids.shape[1])[None]
        for depth in range(1, 6):
            h = draft(draft.embed(ids), x, positions, cache)[:, -1:]
            ids, x = draft.to_target_ids(draft.logits(h).argmax(-1)), draft.feedback(h)
            positions = positions[:, -1:] + 1
            assert int(tree.tokens[0, depth]) == int(ids)
    assert tree.parents[0].tolist() == [-1, 0, 1, 2, 3, 4]


def test_top_takes_the_first_of_equals() -> None:
    values = torch.tensor([[-0.0, 3.0, 0.0, 3.0, -torch.inf, -1.0, 0.0, -torch.inf, 1e-40]])
    best, index = top(values, 9)
    assert index.tolist() == [[1, 3, 8, 0, 2, 6, 5, 4, 7]]
    assert torch.equal(best, values.gather(1, index))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert top(values.to(dtype)[:, :8], 4)[1].tolist() == [[1, 3, 0, 2]]


def parent_arrays(nodes: int) -> st.SearchStrategy[list[int]]:
    return st.tuples(*(st.integers(0, i) for i in range(nodes - 1))).map(lambda t: [-1, *t])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 140).flatmap(lambda n: st.tuples(parent_arrays(n), parent_arrays(n))))
def test_masks_words_and_paths(pair: tuple[list[int], list[int]]) -> None:
    """Two trees of 1..140 nodes, the second cut in half: what follows is padding."""
    used = [len(pair[0]), (len(pair[1]) + 1) // 2]
    rows = [pair[0], pair[1][: used[1]] + [-1] * (len(pair[1]) - used[1])]
    parents = torch.tensor(rows)
    mask, words, paths = (f(parents) for f in (ancestor_mask, ancestor_words, root_paths))
    assert words.shape == (2, len(pair[0]), -(-len(pair[0]) // 64))
    for b, row in enumerate(rows):
        lines: list[list[int]] = []  # from the root to each node
        for i, parent in enumerate(row):
            lines.append([*(lines[parent] if parent >= 0 else []), i])
            assert mask[b, i].nonzero().flatten().tolist() == lines[i]
            bits = "".join(f"{w & (2**64 - 1):064b}"[::-1] for w in words[b, i].tolist())
            assert [j for j, bit in enumerate(bits) if bit == "1"] == lines[i]
        leaves = [i for i in range(used[b]) if i not in row]
        expected = [lines[i] + [-1] * (len(row) - len(lines[i])) for i in leaves]
        assert paths[b, : len(leaves)].tolist() == expected
        assert (paths[b, len(leaves) :] == -1).all()
    deepest = max(len(path[path >= 0]) for path in paths.flatten(0, 1)) - 1
    assert torch.equal(ancestor_mask(parents, deepest), mask)
    assert torch.equal(root_paths(parents, deepest), paths[..., : deepest + 1])


@torch.no_grad()
@pytest.mark.parametrize(
    "choices",
    [{"layer_input": "first"}, {"layer_input": "every", "feedback": "post_norm"}],
    ids=["first", "every"],
)
@pytest.mark.parametrize("window", [None, 3])
def test_a_node_sees_its_own_branch_only(choices: dict[str, str], window: int | None) -> None:
    """Every scored branch run as a chain of its own gives the same logits; two layers, 3 slots."""
    fields = {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "num_hidden_layers": 2,
        "vocab_size": 30,
        "draft_vocab_size": 30,
        "target_hidden_size": 8,
        "num_aux_hidden_states": 2,
        "aux_layer_ids": (1, 2),
        "max_position_embeddings": 64,
        "sliding_window": window,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    draft = Eagle3Draft(DraftConfig.from_dict(fields | choices)).double()
    draft.init_weights(torch.Generator().manual_seed(0), std=0.3)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 30, (1, 5), generator=generator)
    aux = torch.randn(1, 5, 16, generator=generator, dtype=torch.float64)
    cache = CacheContext(window)
    x = draft.project(aux)
    whole = draft(draft.embed(ids), x, torch.arange(5)[None], cache)
    # Two trees behind the same cache, one that sees five slots and one that sees three.
    lengths = torch.tensor([5, 3])
    context = TreeContext(cache, lengths)
    shape = TreeShape(4, 3, 14)
    tree = draft_tree(
        draft, ids[0, lengths - 1], whole[0, lengths - 1], lengths - 1, context, shape
    )
    for b, length in enumerate(lengths.tolist()):
        for path in root_paths(tree.parents[b : b + 1])[0]:
            own, score = CacheContext(window), 0.0
            h = draft(draft.embed(ids[:, :length]), x[:, :length], torch.arange(length)[None], own)
            for step, node in enumerate(path[path >= 0][1:].tolist()):
                token = tree.tokens[b, node]
                score += float(draft.logits(h[:, -1:]).log_softmax(-1)[0, 0, token])
                # 1e-5: scores are sums of fp32 numbers below 64
                assert float(tree.scores[b, node]) == pytest.approx(score, abs=1e-5)
                position = torch.tensor([[length + step]])
                h = draft(draft.embed(token[None, None]), draft.feedback(h[:, -1:]), position, own)


def test_the_walk_of_a_known_answer() -> None:
    """How a trainer uses a tree: the text's own next tokens, by depth, as every node's target."""
    tree = DraftTree(
        torch.tensor([[9, 4, 5, 6, 4, 6]]),
        torch.tensor([[-1, 0, 0, 2, 2, 4]]),
        torch.tensor([[0, 1, 1, 2, 2, 3]]),
        torch.zeros(1, 6),
    )
    text = torch.tensor([[5, 4, 7, 8]])
    got = greedy_tree(tree.tokens, tree.parents, text.gather(1, tree.depths))
    assert (got.num_accepted.tolist(), got.bonus.tolist()) == ([2], [7])
