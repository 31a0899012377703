"""The rounds that chains and trees would make on recorded answers: greedy and at temperature 1.

Shapes: B rounds, K depth, N nodes, S tokens of a sample, T target hidden size, D and V draft and
target vocabulary.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle3_core import Eagle3Draft
from eagle3_core.accept import AcceptCounts, count_accepted, expected_accept_length
from eagle3_core.rounds import RecordedRounds, follow
from eagle3_core.tree import DraftTree, TreeShape
from eagle3_train.store import Sample
from eagle3_train.ttt import Batch, chain_slots

# What is simulated, and how a table calls it. Chains and trees hold the draft's first choices, as
# the engine drafts them; only a drawn chain takes each token by chance, from the draft's own law.
LAWS = {
    "greedy_chain": "greedy, chain",
    "greedy_tree": "greedy, tree",
    "sampled_chain": "T = 1, chain",
    "drawn_chain": "T = 1, drawn chain",
    "sampled_tree": "T = 1, tree",
}
_CHUNK_ELEMENTS = 1 << 23  # logits of one chunk of rounds


@dataclass(frozen=True)
class Simulated:
    """Counts over rounds; they add up over samples."""

    laws: dict[str, AcceptCounts]
    argmax: float = 0.0  # rounds whose first recorded token is the target's argmax
    argmax_probability: float = 0.0  # of the target there, summed over rounds

    @classmethod
    def nothing(cls, steps: int) -> "Simulated":
        """No round yet."""
        return cls({law: AcceptCounts(0, (0.0,) * steps) for law in LAWS})

    @property
    def num_rounds(self) -> int:
        """The same for all laws."""
        return self.laws["greedy_chain"].num_rounds

    def summary(self) -> dict[str, Any]:
        """JSON-ready; means are None where there was no round.

        `argmax_share` near 1 says that the answers were written greedily, near
        `argmax_probability` that they were drawn at temperature 1.
        """
        rounds = max(1, self.num_rounds)
        return {
            "rounds": self.num_rounds,
            "argmax_share": self.argmax / rounds,
            "argmax_probability": self.argmax_probability / rounds,
            "laws": {
                law: {
                    "accept_length": counts.accept_length,
                    "acceptance_per_position": counts.per_position,
                }
                for law, counts in self.laws.items()
            },
        }

    def __add__(self, other: "Simulated") -> "Simulated":
        laws = {law: counts + other.laws[law] for law, counts in self.laws.items()}
        return Simulated(
            laws,
            self.argmax + other.argmax,
            self.argmax_probability + other.argmax_probability,
        )


@dataclass(frozen=True)
class Simulator:
    """Makes every round that the answers of a sample have room for."""

    draft: Eagle3Draft
    head: Tensor  # [V,T] float32, the target's
    tree: TreeShape
    chain: TreeShape = field(init=False)
    kept: Tensor = field(init=False)  # [D] target ids of the draft's
    kept_head: Tensor = field(init=False)  # [D,T]

    def __post_init__(self) -> None:
        """What all samples share."""
        object.__setattr__(self, "chain", TreeShape(self.tree.num_speculative_tokens))
        ids = torch.arange(self.draft.config.draft_vocab_size, device=self.head.device)
        object.__setattr__(self, "kept", self.draft.to_target_ids(ids))
        object.__setattr__(self, "kept_head", self.head[self.kept])

    @torch.no_grad()
    def run(self, sample: Sample) -> Simulated:
        """Counts of a sample's rounds."""
        steps = self.tree.num_speculative_tokens
        batch = Batch.pack([sample])
        slots = chain_slots(batch, steps).all(0).nonzero().flatten()
        total = Simulated.nothing(steps)
        if not len(slots):
            return total
        recording = _Recording.of(sample, self.head.device)
        rounds = RecordedRounds(self.draft, recording.ids, recording.aux)
        width = max(steps, self.tree.topk) * self.draft.config.draft_vocab_size
        for chunk in slots.split(max(1, _CHUNK_ELEMENTS // width)):
            total += self._rounds(recording, rounds, chunk.to(self.head.device))
        return total

    def _rounds(self, recording: "_Recording", rounds: RecordedRounds, slots: Tensor) -> Simulated:
        ahead = slots[:, None] + torch.arange(1, self.tree.num_speculative_tokens + 1).to(slots)
        choice, recorded = recording.argmax[ahead], recording.ids[ahead + 1]
        laws: dict[str, AcceptCounts] = {}
        for name, shape in (("chain", self.chain), ("tree", self.tree)):
            tree = rounds.trees(slots, shape)
            accepted = follow(tree, choice).num_accepted
            laws[f"greedy_{name}"] = count_accepted(accepted, choice.shape[1])
            laws[f"sampled_{name}"] = self._sampled(tree, recorded, recording, slots)
        laws["drawn_chain"] = self._drawn(recording, recorded, rounds, slots)
        first = slots + 1
        probable = self._probability(recording, first, choice[:, 0])
        return Simulated(
            {law: laws[law] for law in LAWS},
            float((choice[:, 0] == recorded[:, 0]).sum()),
            float(probable.double().sum()),
        )

    def _sampled(
        self, tree: DraftTree, recorded: Tensor, recording: "_Recording", slots: Tensor
    ) -> AcceptCounts:
        """A tree whose topology owes nothing to coins, at temperature 1."""
        walk = follow(tree, recorded).path  # [B,K+1]
        depths = tree.depths.expand_as(tree.tokens)
        # The teacher of a node at depth d, if the walk reaches its parent.
        p = self._probability(recording, slots[:, None] + depths.clamp(min=1), tree.tokens)
        child = tree.parents[:, None] == walk[:, :-1, None]  # [B,K,N], of the node reached
        reached = walk >= 0
        offered = (child & reached[:, :-1, None]) * p[:, None].double()
        return expected_accept_length(offered.sum(-1).T, reached[:, 1:].double().T)

    def _drawn(
        self,
        recording: "_Recording",
        recorded: Tensor,
        rounds: RecordedRounds,
        slots: Tensor,
    ) -> AcceptCounts:
        """A chain of drafts that are drawn from the draft's own law, at temperature 1."""
        offered, kept = [], []
        for k, logits in enumerate(rounds.along(recorded, slots)):
            log_q = logits.float().log_softmax(-1)
            at = slots + 1 + k
            log_p = recording.final[at] @ self.kept_head.T - recording.logz[at, None]
            offered.append(torch.minimum(log_p, log_q).exp().sum(-1))
            same = self.kept == recorded[:, k, None]  # no column for tokens that are not drafted
            ratio = (log_q - log_p).exp().clamp(max=1)
            kept.append(torch.where(same, ratio, 0.0).sum(-1))
        return expected_accept_length(torch.stack(offered), torch.stack(kept))

    def _probability(self, recording: "_Recording", at: Tensor, tokens: Tensor) -> Tensor:
        """The target's probability of `tokens` after position `at`, of any shape."""
        logits = (recording.final[at] * self.head[tokens]).sum(-1)
        return (logits - recording.logz[at]).exp()


@dataclass(frozen=True)
class _Recording:
    """A sample as the simulation reads it."""

    ids: Tensor  # [S] int64
    aux: Tensor  # [S,A·T] float32
    final: Tensor  # [S,T] float32
    argmax: Tensor  # [S] int64
    logz: Tensor  # [S] float32

    @classmethod
    def of(cls, sample: Sample, device: torch.device) -> "_Recording":
        return cls(
            sample.input_ids.long().to(device),
            sample.aux.float().to(device),
            sample.final.float().to(device),
            sample.argmax.long().to(device),
            sample.logz.float().to(device),
        )
