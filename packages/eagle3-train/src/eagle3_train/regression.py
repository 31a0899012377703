"""Start a draft where least squares on the captured states puts it, before any gradient step.

Let y_t be the target's last state at position t, scaled to what its final norm hands on. Two ridge
regressions over supervised slots give a draft that is linear but already useful:

1. `fc` maps the aux states at t to the state that is fed back, so the first step of a chain takes
   in the same kind of state as every later one.
2. The layer adds to that state what turns it, with the embedding of token t+1, into y_{t+1}.

The second map runs through attention. On the embedding half, queries and keys share one random
projection, so a slot attends to itself (or to the same token elsewhere, whose embedding is the
same); on the hidden half they start at zero. Values carry the map's right singular vectors, the
output projection its left ones. The MLP and deeper layers start as identity.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from eagle3_core import DraftConfig, Eagle3Draft, UserError
from eagle3_core.draft import DraftLayer
from eagle3_train.evaluate import Samples
from eagle3_train.store import Sample

# Samples of each unknown: the slots used are this many times the width of the regressor.
_SLOTS_PER_FEATURE = 24
# Relative to the mean square of a feature; keeps directions that the data barely covers small.
_RIDGE = 1e-3
# Attention score of a slot with itself. softmax of 20 against a few hundred near-zero scores is one
# to four digits, and training can still move it.
_SELF_SCORE = 20.0


@torch.no_grad()
def start_by_regression(draft: Eagle3Draft, samples: Samples, seed: int) -> int:
    """Fit fc and the first layer in place; embeddings, head and norm must be the target's already.

    Args:
        draft: float32, H == T.
        samples: with the target's states.
        seed: of the random projection that makes slots attend to themselves.

    Returns:
        The number of slots used.

    Raises:
        UserError: the hidden sizes differ, there is no fc, or no slot is supervised.
    """
    config = draft.config
    check_startable(config)
    chosen = _choose(samples, _SLOTS_PER_FEATURE * config.aux_width)
    states = _Ridge(config.aux_width, config.hidden_size)
    for sample, slots in chosen:
        states.add(draft.norm_aux(sample.aux[slots].float()), _fed_back(draft, sample, slots))
    if not states.count:
        raise UserError(
            "draft.init is least_squares, but no slot of the training data is supervised"
        )
    draft.fc.weight.copy_(states.solve().T)

    update = _Ridge(2 * config.hidden_size, config.hidden_size)
    first = draft.layers[0]
    assert isinstance(first, DraftLayer)
    for sample, slots in chosen:
        e = draft.embed(sample.input_ids[slots + 1])
        x = draft.project(sample.aux[slots].float())
        attn_in, normed = draft.ops.norm_concat(
            e, first.input_layernorm.weight, x, _hidden_norm(first), config.rms_norm_eps
        )
        residual = normed if config.residual == "normed" else x
        update.add(attn_in, _before_norm(draft, sample, slots + 1) - residual)
    for layer in draft.layers:
        assert isinstance(layer, DraftLayer)
        layer.init_identity()
    _write_update(first, update.solve(), _mean_embedding(draft, [s for s, _ in chosen]), seed)
    return states.count


def check_startable(config: DraftConfig) -> None:
    """Refuse a draft whose fed-back state cannot be the target's.

    Raises:
        UserError: the hidden sizes differ, or there is no fc.
    """
    if config.hidden_size != config.target_hidden_size or not config.has_fc:
        raise UserError(
            f"draft.init is least_squares, which needs hidden_size {config.hidden_size} to equal "
            f"the target's {config.target_hidden_size}, and an fc; use draft.init: random"
        )


class _Ridge:
    """Least squares over rows that come in pieces, with a small penalty."""

    def __init__(self, features: int, outputs: int) -> None:
        self.count = 0
        self._gram = torch.zeros(features, features, dtype=torch.float64)
        self._cross = torch.zeros(features, outputs, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        """x [n,features], y [n,outputs] of one sample."""
        self.count += len(x)
        self._gram += x.T @ x
        self._cross += x.T @ y

    def solve(self) -> Tensor:
        """[features, outputs] float32."""
        penalty = _RIDGE * self._gram.diagonal().mean()
        self._gram.diagonal().add_(penalty)
        return torch.linalg.solve(self._gram, self._cross).float()


def _choose(samples: Samples, count: int) -> list[tuple[Sample, Tensor]]:
    """The first samples that hold `count` supervised slots, each with its slots."""
    chosen, found = [], 0
    for index in range(len(samples)):
        if found >= count:
            break
        sample = samples[index]
        slots = _slots(sample)
        chosen.append((sample, slots))
        found += len(slots)
    return chosen


def _slots(sample: Sample) -> Tensor:
    """Slots t whose input x[t+1] and predicted x[t+2] are responses."""
    mask = sample.loss_mask
    return (mask[1:-1] & mask[2:]).nonzero().flatten()


def _before_norm(draft: Eagle3Draft, sample: Sample, at: Tensor) -> Tensor:
    """[n,H] the target's last states before the final norm's weight, at unit mean square."""
    weight = draft.norm.weight
    # A channel that the norm switches off carries nothing back.
    return sample.final[at].float() / torch.where(weight == 0, torch.inf, weight)


def _fed_back(draft: Eagle3Draft, sample: Sample, at: Tensor) -> Tensor:
    if draft.config.feedback == "post_norm":
        return sample.final[at].float()
    return _before_norm(draft, sample, at)


def _hidden_norm(layer: DraftLayer) -> Tensor:
    assert layer.hidden_norm is not None, "the first layer sees the embedding"
    return layer.hidden_norm.weight


def _mean_embedding(draft: Eagle3Draft, samples: Sequence[Sample]) -> Tensor:
    """[H] unit vector: what all embeddings share and must not count as likeness."""
    ids = torch.cat([sample.input_ids for sample in samples]).unique()
    first = draft.layers[0]
    assert isinstance(first, DraftLayer)
    normed = draft.ops.rms_norm(
        draft.embed(ids), first.input_layernorm.weight, draft.config.rms_norm_eps
    )
    return torch.nn.functional.normalize(normed.mean(0), dim=0)


def _write_update(layer: DraftLayer, update: Tensor, shared: Tensor, seed: int) -> None:
    """Put a map [2H,H] of the layer's input into its attention."""
    attention, hidden = layer.self_attn, update.shape[1]
    head_dim = attention.head_dim
    kv_heads = attention.k_proj.out_features // head_dim
    group = attention.q_proj.out_features // attention.k_proj.out_features
    # A normed vector has squared length H, a projection of it to head_dim dimensions head_dim.
    gain = (_SELF_SCORE * head_dim**0.5 / head_dim) ** 0.5
    attention.q_proj.weight.zero_()
    attention.k_proj.weight.zero_()
    for head, rows in enumerate(_projections(kv_heads, head_dim, shared, seed)):
        own = slice(head * head_dim, (head + 1) * head_dim)
        attention.k_proj.weight[own, :hidden] = gain * rows
        for query in range(head * group, (head + 1) * group):
            own = slice(query * head_dim, (query + 1) * head_dim)
            attention.q_proj.weight[own, :hidden] = gain * rows
    rank = min(kv_heads * head_dim, hidden)
    left, values, right = torch.linalg.svd(update.T, full_matrices=False)
    root = values[:rank].sqrt()
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[:rank] = root[:, None] * right[:rank]
    # Query heads that share values each write their share of the output.
    written = torch.zeros(hidden, kv_heads * head_dim)
    written[:, :rank] = left[:, :rank] * root / group
    by_head = written.unflatten(1, (kv_heads, 1, head_dim)).expand(-1, -1, group, -1)
    attention.o_proj.weight.copy_(by_head.flatten(1))


def _projections(count: int, head_dim: int, shared: Tensor, seed: int) -> Iterator[Tensor]:
    """[head_dim,H] random orthonormal rows, none of which sees `shared`."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        random = torch.randn(head_dim, len(shared), generator=generator)
        random -= (random @ shared)[:, None] * shared
        yield torch.linalg.qr(random.T).Q.T
