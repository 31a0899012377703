"""The draft against its defining formulas, evaluated slot by slot in float64 without its code.

`Reference` reads the weights by their checkpoint names, so it also pins the names. It takes the
cos/sin tables from the draft, because transformers rounds them to fp32; test_draft_rope.py checks
those tables against the written-out formulas. All else is float64 on both sides, values are of
order one, and a slot is some thousand roundings of 1e-16: 1e-10 leaves room for nothing but those.
"""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3_core import CacheContext, DraftConfig, Eagle3Draft, TorchOps, UnrollContext

KeyValue = tuple[Tensor, Tensor]  # k and v of one slot in one layer, each [num_kv_heads, head_dim]
BATCH, SLOTS, STEPS = 2, 6, 4

FACTORS: dict[str, tuple[Any, ...]] = {
    "layer_input": ("first", "every"),
    "num_hidden_layers": (1, 2, 3),
    "aux_norm": ("none", "per_layer", "concat", "concat_per_layer"),
    "residual": ("raw", "normed"),
    "feedback": ("pre_norm", "post_norm"),
    "num_aux_hidden_states": (3, 1, 5),
    "target_hidden_size": (16, 12),  # equal to hidden_size, or not
    "draft_vocab_size": (40, 23),  # all of vocab_size, or pruned
    "num_key_value_heads": (4, 2, 1),
    "head_dim": (4, 6),  # hidden_size / num_attention_heads, or not
    "fc_bias": (False, True),
    "attention_bias": (False, True),
    "attention_output_bias": (False, True),
    "mlp_bias": (False, True),
    "qk_norm": (False, True),
    "sliding_window": (None, 2),
}


def make_config(**choices: Any) -> DraftConfig:
    base: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_attention_heads": 4,
        "vocab_size": 40,
        "rms_norm_eps": 1e-2,  # large enough to show where it is left out
        "rope_parameters": {"rope_type": "default", "rope_theta": 20.0},
    }
    return DraftConfig(**base, **{name: values[0] for name, values in FACTORS.items()} | choices)


def pairs_of(row: dict[str, Any]) -> set[Any]:
    return set(itertools.combinations(row.items(), 2))


def pairwise_rows() -> list[dict[str, Any]]:
    """Rows of choices such that any two values of any two factors meet in one of them."""
    rng = random.Random(0)
    missing: set[Any] = set()
    for (a, a_values), (b, b_values) in itertools.combinations(FACTORS.items(), 2):
        missing |= {((a, x), (b, y)) for x in a_values for y in b_values}
    rows = []
    while missing:
        start = dict(min(missing, key=repr))
        candidates = [
            {name: start.get(name, rng.choice(values)) for name, values in FACTORS.items()}
            for _ in range(40)
        ]
        rows.append(max(candidates, key=lambda row: len(pairs_of(row) & missing)))
        missing -= pairs_of(rows[-1])
    return rows


ROWS = pairwise_rows()


def row_id(row: dict[str, Any]) -> str:
    return "-".join(str(value) for value in row.values())


class Reference:
    """The draft's formulas, one slot of one row at a time. T, H, d as in the draft's docstring."""

    def __init__(self, config: DraftConfig, weights: dict[str, Tensor], tables: KeyValue) -> None:
        self.config, self.weights = config, weights
        self.cos, self.sin = tables  # [positions, d]
        self.names_read: set[str] = set()

    def weight(self, name: str) -> Tensor:
        self.names_read.add(name)
        return self.weights[name]

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
        return self.weight(f"{name}.weight") * x / (mean_square + self.config.rms_norm_eps).sqrt()

    def linear(self, x: Tensor, name: str, bias: bool = False) -> Tensor:
        y = (self.weight(f"{name}.weight") * x).sum(-1)
        return y + self.weight(f"{name}.bias") if bias else y

    def project(self, aux: Tensor) -> Tensor:
        """[A·T] -> [H]."""
        if self.config.aux_norm in ("concat", "concat_per_layer"):
            aux = self.norm(aux, "input_norm")
        if self.config.aux_norm in ("per_layer", "concat_per_layer"):
            states = aux.split(self.config.target_hidden_size)
            aux = torch.cat([self.norm(state, f"fc_norm.{i}") for i, state in enumerate(states)])
        return self.linear(aux, "fc", self.config.fc_bias) if self.config.has_fc else aux

    def embed(self, token: Tensor) -> Tensor:
        return self.weight("embed_tokens.weight")[token]

    def logits(self, h: Tensor) -> Tensor:
        return self.linear(self.norm(h, "norm"), "lm_head")

    def feedback(self, h: Tensor) -> Tensor:
        return self.norm(h, "norm") if self.config.feedback == "post_norm" else h

    def rotate(self, x: Tensor, position: int) -> Tensor:
        half = self.config.head_dim // 2
        cos, sin = self.cos[position, :half], self.sin[position, :half]
        low, high = x[:, :half], x[:, half:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=1)

    def attention(
        self, layer: str, x: Tensor, position: int, seen: list[KeyValue]
    ) -> tuple[Tensor, KeyValue]:
        c = self.config
        q, k, v = (
            self.linear(x, f"{layer}.{name}_proj", c.attention_bias).view(-1, c.head_dim)
            for name in "qkv"
        )
        if c.qk_norm:
            q, k = self.norm(q, f"{layer}.q_norm"), self.norm(k, f"{layer}.k_norm")
        q, k = self.rotate(q, position), self.rotate(k, position)
        visible = [*seen, (k, v)]
        heads = []
        for head in range(c.num_attention_heads):
            group = head * c.num_key_value_heads // c.num_attention_heads
            scores = [(q[head] * key[group]).sum() / math.sqrt(c.head_dim) for key, _ in visible]
            weights = torch.stack([score.exp() for score in scores])
            values = torch.stack([value[group] for _, value in visible])
            heads.append((weights[:, None] * values).sum(0) / weights.sum())
        return self.linear(torch.cat(heads), f"{layer}.o_proj", c.attention_output_bias), (k, v)

    def mlp(self, x: Tensor, layer: str) -> Tensor:
        bias = self.config.mlp_bias
        gate = self.linear(x, f"{layer}.gate_proj", bias)
        up = self.linear(x, f"{layer}.up_proj", bias)
        return self.linear(gate / (1 + (-gate).exp()) * up, f"{layer}.down_proj", bias)

    def slot(
        self, e: Tensor, x: Tensor, position: int, seen: list[list[KeyValue]]
    ) -> tuple[Tensor, list[KeyValue]]:
        """e, x [H]; `seen[j]` holds what an earlier slot returned -> h [H], keys per layer."""
        own = []
        for i in range(self.config.num_hidden_layers):
            layer = f"layers.{i}"
            residual = x
            if i == 0 or self.config.layer_input == "every":
                hidden = self.norm(x, f"{layer}.hidden_norm")
                inputs = torch.cat([self.norm(e, f"{layer}.input_layernorm"), hidden])
                if self.config.residual == "normed":
                    residual = hidden
            else:
                inputs = self.norm(x, f"{layer}.input_layernorm")
            attended, key_value = self.attention(
                f"{layer}.self_attn", inputs, position, [keys[i] for keys in seen]
            )
            own.append(key_value)
            h = residual + attended
            x = h + self.mlp(self.norm(h, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
        return x, own

    def decode(self, e: Tensor, x: Tensor) -> Tensor:
        """e, x [S,H] -> h [S,H], slot t at position t seeing its window of slots j <= t."""
        window = self.config.sliding_window or len(e)
        states, keys = [], []
        for t in range(len(e)):
            h, own = self.slot(e[t], x[t], t, keys[max(0, t + 1 - window) :])
            states.append(h)
            keys.append(own)
        return torch.stack(states)

    def unroll(self, aux: Tensor, tokens: Tensor, steps: int, documents: Tensor) -> list[Tensor]:
        """aux [S,A·T], tokens [>=S+steps], documents [S] -> h [S,H] of every step."""
        slots = range(len(aux))
        window = self.config.sliding_window or len(aux) + steps
        x = [self.project(state) for state in aux]
        keys: list[list[list[KeyValue]]] = []  # [step][slot][layer]
        out = []
        for k in range(steps):
            keys.append([])
            states = []
            for t in slots:
                before = range(t) if k == 0 else range(t + 1)
                seen = [
                    keys[0][j]
                    for j in before
                    if documents[j] == documents[t] and t + k - j < window
                ]
                seen += [keys[i][t] for i in range(1, k) if k - i < window]
                h, own = self.slot(self.embed(tokens[t + 1 + k]), x[t], t + k, seen)
                keys[k].append(own)
                states.append(h)
            x = [self.feedback(h) for h in states]
            out.append(torch.stack(states))
        return out


@dataclass(frozen=True)
class Setup:
    draft: Eagle3Draft
    reference: Reference
    aux: Tensor  # [BATCH, SLOTS, A·T]
    tokens: Tensor  # [BATCH, SLOTS + STEPS]


class TableRecorder(TorchOps):
    """Keeps the tables that the draft hands to `rope`."""

    tables: KeyValue

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> KeyValue:
        self.tables = cos[0], sin[0]
        return super().rope(q, k, cos, sin)


def rope_tables(config: DraftConfig, positions: int) -> KeyValue:
    recorder = TableRecorder()
    zeros = torch.zeros(1, positions, config.hidden_size, dtype=torch.float64)
    context = CacheContext(config.sliding_window)
    Eagle3Draft(config, recorder).double()(zeros, zeros, torch.arange(positions)[None], context)
    return recorder.tables


def make_setup(config: DraftConfig, ops: TorchOps | None = None) -> Setup:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    draft = Eagle3Draft(config, ops).double()
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.dim() > 1:
                scale = 1.0 if name.startswith("embed") else 1.5 / math.sqrt(parameter.shape[1])
                parameter.copy_(scale * normal(*parameter.shape))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * normal(*parameter.shape))
            else:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    weights = {name: value.detach().clone() for name, value in draft.named_parameters()}
    reference = Reference(config, weights, rope_tables(config, SLOTS + STEPS))
    tokens = torch.randint(config.vocab_size, (BATCH, SLOTS + STEPS), generator=generator)
    width = config.num_aux_hidden_states * config.target_hidden_size
    return Setup(draft, reference, 2.0 * normal(BATCH, SLOTS, width), tokens)


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{what} differs: {text}"
    )


def by_row(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    return torch.stack([function(*row) for row in zip(*rows, strict=True)])


def by_slot(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.stack([torch.stack([function(slot) for slot in row]) for row in x])


def unroll_draft(setup: Setup, documents: Tensor | None, steps: int = STEPS) -> list[Tensor]:
    draft = setup.draft
    context = UnrollContext(documents, sliding_window=draft.config.sliding_window)
    x, states = draft.project(setup.aux), []
    for k in range(steps):
        e = draft.embed(setup.tokens[:, 1 + k : 1 + k + SLOTS])
        positions = (torch.arange(SLOTS) + k).expand(BATCH, SLOTS)
        states.append(draft(e, x, positions, context))
        x = draft.feedback(states[-1])
    return states


def check_prefill(setup: Setup) -> None:
    """The draft's states and logits over SLOTS positions equal the reference's."""
    draft, reference = setup.draft, setup.reference
    e, x = draft.embed(setup.tokens[:, 1 : SLOTS + 1]), draft.project(setup.aux)
    assert_same(e, by_slot(reference.embed, setup.tokens[:, 1 : SLOTS + 1]), "embedding")
    assert_same(x, by_slot(reference.project, setup.aux), "projection")
    h = draft(
        e, x, torch.arange(SLOTS).expand(BATCH, -1), CacheContext(draft.config.sliding_window)
    )
    expected = by_row(reference.decode, e, x)
    assert_same(h, expected, "h")
    assert_same(draft.logits(h), by_slot(reference.logits, expected), "logits")
    assert_same(draft.feedback(h), by_slot(reference.feedback, expected), "feedback")


def test_rows_cover_every_pair_of_choices() -> None:
    covered = set().union(*(pairs_of(row) for row in ROWS))
    wanted = itertools.combinations(FACTORS.values(), 2)
    assert len(covered) == sum(len(a) * len(b) for a, b in wanted)
    assert len(ROWS) < 40  # tests below run once a row


@pytest.mark.parametrize("row", ROWS, ids=row_id)
@torch.no_grad()
def test_one_piece(row: dict[str, Any]) -> None:
    setup = make_setup(make_config(**row))
    check_prefill(setup)
    # Every parameter had a part in it, under the name the formulas give it.
    assert setup.reference.names_read == {name for name, _ in setup.draft.named_parameters()}


@torch.no_grad()
def test_without_fc_the_normed_aux_states_are_the_projection() -> None:
    config = make_config(
        has_fc=False, num_aux_hidden_states=2, target_hidden_size=8, aux_norm="per_layer"
    )
    setup = make_setup(config)
    assert not any(name.startswith("fc.") for name in setup.draft.state_dict())
    check_prefill(setup)


@pytest.mark.parametrize("row", ROWS, ids=row_id)
@torch.no_grad()
def test_token_by_token_with_rejected_proposals(row: dict[str, Any]) -> None:
    setup = make_setup(make_config(**row))
    draft = setup.draft
    e, x = draft.embed(setup.tokens[:, 1 : SLOTS + 1]), draft.project(setup.aux)
    expected = by_row(setup.reference.decode, e, x)
    context = CacheContext(draft.config.sliding_window)

    def run(first: int, last: int, rows: Tensor) -> Tensor:
        positions = torch.arange(first, last).expand(BATCH, -1)
        return draft(rows[:, first:last], x[:, first:last], positions, context)

    assert_same(run(0, 2, e), expected[:, :2], "prefill of two")
    for t in range(2, SLOTS):
        run(t, min(t + 2, SLOTS), -e)  # other tokens, then taken back
        context.truncate(t)
        assert context.length == t
        assert_same(run(t, t + 1, e), expected[:, t : t + 1], f"slot {t}")


@pytest.mark.parametrize("row", ROWS, ids=row_id)
@torch.no_grad()
def test_unroll_over_documents(row: dict[str, Any]) -> None:
    setup = make_setup(make_config(**row))
    documents = torch.tensor([[0, 0, 0, 0, 0, 0], [4, 4, 4, 9, 9, 1]])
    states = unroll_draft(setup, documents)
    expected = zip(
        *(
            setup.reference.unroll(aux, tokens, STEPS, document)
            for aux, tokens, document in zip(setup.aux, setup.tokens, documents, strict=True)
        ),
        strict=True,
    )
    for k, (h, rows) in enumerate(zip(states, expected, strict=True)):
        assert_same(h, torch.stack(rows), f"h of step {k}")
        logits = by_slot(setup.reference.logits, torch.stack(rows))
        assert_same(setup.draft.logits(h), logits, f"logits of step {k}")


@pytest.mark.parametrize("row", ROWS, ids=row_id)
@torch.no_grad()
def test_last_slot_of_an_unroll_is_incremental_decoding(row: dict[str, Any]) -> None:
    setup = make_setup(make_config(**row))
    draft = setup.draft
    unrolled = unroll_draft(setup, documents=None)
    context = CacheContext(draft.config.sliding_window)
    positions = torch.arange(SLOTS + STEPS).expand(BATCH, -1)
    e, x = draft.embed(setup.tokens), draft.project(setup.aux)
    h = draft(e[:, 1 : SLOTS + 1], x, positions[:, :SLOTS], context)
    assert_same(h, unrolled[0], "prefill")
    for k in range(1, STEPS):
        slot = slice(SLOTS + k - 1, SLOTS + k)
        h = draft(e[:, SLOTS + k, None], draft.feedback(h[:, -1:]), positions[:, slot], context)
        assert_same(h[:, 0], unrolled[k][:, -1], f"step {k}")


@pytest.mark.parametrize("row", ROWS[::3], ids=row_id)
def test_gradients_of_a_three_step_unroll(row: dict[str, Any]) -> None:
    setup = make_setup(make_config(**row))
    reference, documents = setup.reference, torch.tensor([[0] * SLOTS, [0, 0, 1, 1, 1, 2]])
    generator = torch.Generator().manual_seed(1)
    size = (3, BATCH, SLOTS, setup.draft.config.draft_vocab_size)
    cotangents = torch.randn(size, generator=generator, dtype=torch.float64)

    aux = setup.aux.requires_grad_()
    states = unroll_draft(setup, documents, steps=3)
    logits = torch.stack([setup.draft.logits(h) for h in states])
    (logits * cotangents).sum().backward()

    for weight in reference.weights.values():
        weight.requires_grad_()
    expected_aux = aux.detach().clone().requires_grad_()
    for b in range(BATCH):
        rows = reference.unroll(expected_aux[b], setup.tokens[b], 3, documents[b])
        for k, row_states in enumerate(rows):
            expected = torch.stack([reference.logits(h) for h in row_states])
            (expected * cotangents[k, b]).sum().backward(retain_graph=True)

    assert aux.grad is not None
    assert expected_aux.grad is not None
    assert_same(aux.grad, expected_aux.grad, "gradient of the aux states")
    for name, parameter in setup.draft.named_parameters():
        grad, expected = parameter.grad, reference.weights[name].grad
        assert grad is not None, name
        assert expected is not None, name
        assert_same(grad, expected, f"gradient of {name}")


class ResidualTwice(TorchOps):
    def add_rms_norm(
        self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return super().add_rms_norm(residual, residual + delta, weight, eps)


class ResidualTwiceAfterTheNorm(TorchOps):
    def add_rms_norm(
        self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total, normed = super().add_rms_norm(residual, delta, weight, eps)
        return total + residual, normed


class HiddenBeforeEmbedding(TorchOps):
    def norm_concat(
        self, e: Tensor, e_weight: Tensor, x: Tensor, x_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        both, normed = super().norm_concat(e, e_weight, x, x_weight, eps)
        return both.roll(x.shape[-1], dims=-1), normed


class RotatedBackwards(TorchOps):
    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rope(q, k, cos, -sin)


@pytest.mark.parametrize(
    "mutant", [ResidualTwice, ResidualTwiceAfterTheNorm, HiddenBeforeEmbedding, RotatedBackwards]
)
@pytest.mark.parametrize(("layer_input", "layers"), [("first", 1), ("first", 3), ("every", 2)])
@torch.no_grad()
def test_a_wrong_draft_is_caught(mutant: type[TorchOps], layer_input: str, layers: int) -> None:
    config = make_config(layer_input=layer_input, num_hidden_layers=layers)
    check_prefill(make_setup(config))
    with pytest.raises(AssertionError, match="h differs"):
        check_prefill(make_setup(config, mutant()))
