"""The target reads the training examples; its states become samples, stored or made on the fly."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from eagle3_core import UserError, default_aux_layer_ids
from eagle3_core.target import Target, capture_boundaries, capture_final
from eagle3_train.data.mask import Example
from eagle3_train.display import display
from eagle3_train.order import pack, share
from eagle3_train.placement import is_sliced
from eagle3_train.processes import Processes
from eagle3_train.store import (
    RollingWriter,
    Sample,
    StoreMeta,
    StoreWriter,
    check_finite,
    fp8,
    head_digest,
    sample_key,
)

_LOGIT_ROWS = 128  # rows of full-vocabulary logits alive at a time


class Capturer:
    """Turns examples into samples.

    logz and argmax are computed in float32 from the states as stored, so the probabilities that a
    trainer gets from `final`, the head and logz sum to one exactly as if nothing had been rounded.

    Args:
        target: reads the examples.
        aux_layer_ids: boundary ids; none = the usual three.
        dtype: of the states in the samples; with float8_e4m3fn the aux states are rounded to
            that, and `final` to bfloat16.

    Raises:
        UserError: an id is out of range, or the target does more to its logits than its lm_head.
    """

    def __init__(
        self,
        target: Target,
        aux_layer_ids: Sequence[int] | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._target, self._dtype = target, dtype
        self._weight = _whole_head(target)
        ids = default_aux_layer_ids(target.num_layers) if aux_layer_ids is None else aux_layer_ids
        if not ids:
            raise UserError("capture.aux_layer_ids is empty, expected at least one boundary id")
        self.meta = StoreMeta(
            target=target.name,
            num_target_layers=target.num_layers,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            head_digest=head_digest(self._weight),
            aux_layer_ids=tuple(sorted(ids)),
            compute_dtype=str(target.model.dtype).removeprefix("torch."),
            dtype=str(dtype).removeprefix("torch."),
        )
        with capture_boundaries(target.model, ids):
            pass  # refuses bad ids
        _check_plain_head(target, self._weight)
        self._head = self._weight.float()
        self._input_device = _input_device(target)

    def head(self) -> Tensor:
        """[V,T] the target's lm_head weight, in the dtype of its arithmetic."""
        return self._weight.cpu()

    @property
    def is_sliced(self) -> bool:
        """Whether every process has to run the same batches."""
        return is_sliced(self._target)

    @torch.no_grad()
    def run(self, examples: Sequence[Example]) -> tuple[list[Sample], Tensor]:
        """One forward pass over a padded batch.

        Returns:
            The samples, and [V] float64: the target's next-token probabilities summed over the
            positions whose next token is supervised.
        """
        model = self._target.model
        lengths = [len(example.input_ids) for example in examples]
        ids = torch.zeros(len(examples), max(lengths), dtype=torch.int64)
        for row, example in enumerate(examples):
            ids[row, : lengths[row]] = example.input_ids
        with (
            capture_boundaries(model, self.meta.aux_layer_ids) as boundaries,
            capture_final(model) as last,
        ):
            # Padding stands to the right, where causality hides it: no mask is needed.
            model.get_decoder()(input_ids=ids.to(self._input_device), use_cache=False)
            final = last.states()[0].to(self._head.device)
            aux = torch.cat([state.to(final.device) for state in boundaries.states()], dim=-1)
        if self._dtype == fp8.DTYPE:  # what a store of that dtype gives back
            aux, final = fp8.rounded(aux, self.meta.hidden_size), final.to(torch.bfloat16)
        else:
            aux, final = aux.to(self._dtype), final.to(self._dtype)
        asked = torch.zeros_like(ids, dtype=torch.bool)
        predicts = torch.zeros_like(asked)
        for row, example in enumerate(examples):
            asked[row, : lengths[row]] = asked_positions(example.loss_mask)
            predicts[row, : lengths[row] - 1] = example.loss_mask[1:]
        argmax, logz, mass = self._next_tokens(final, asked, predicts)
        samples = [
            Sample(
                input_ids=example.input_ids,
                loss_mask=example.loss_mask,
                aux=aux[row, :length].cpu(),
                final=final[row, :length].cpu(),
                argmax=argmax[row, :length],
                logz=logz[row, :length],
            )
            for row, (example, length) in enumerate(zip(examples, lengths, strict=True))
        ]
        for example, sample in zip(examples, samples, strict=True):
            check_finite(sample, example.where)
        return samples, mass

    def _next_tokens(
        self, final: Tensor, asked: Tensor, predicts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """argmax [B,S] int32, logz [B,S] float32, mass [V] float64, on the CPU."""
        argmax = torch.full(asked.shape, -1, dtype=torch.int32)
        logz = torch.zeros(asked.shape)
        mass = torch.zeros(self.meta.vocab_size, dtype=torch.float64, device=self._head.device)
        rows, columns = asked.nonzero(as_tuple=True)
        for chunk in torch.arange(len(rows)).split(_LOGIT_ROWS):
            at = rows[chunk], columns[chunk]
            logits = final[at].float() @ self._head.T
            # As few passes over the vocabulary as there can be: they cost more than the product.
            top, choice = logits.max(-1)
            weights = logits.sub_(top[:, None]).exp_()
            sums = weights.sum(-1)
            argmax[at] = choice.int().cpu()
            logz[at] = (top + sums.log()).cpu()
            mass += (predicts[at].to(sums.device) / sums) @ weights
        return argmax, logz, mass.cpu()


class OnlineFeatures:
    """What `FeatureStore` is, with the target at hand instead of a disk: nothing is kept."""

    def __init__(self, capturer: Capturer, examples: Sequence[Example]) -> None:
        self._capturer, self.examples = capturer, examples
        self.meta = capturer.meta
        self.lengths: Sequence[int] = [len(example.input_ids) for example in examples]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Sample:
        return self._capturer.run([self.examples[index]])[0][0]

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """input_ids [S] int64 and loss_mask [S] bool of a sample, without its states."""
        example = self.examples[index]
        return example.input_ids, example.loss_mask

    def head(self) -> Tensor:
        """[V,T] the target's lm_head weight."""
        return self._capturer.head()


@dataclass(frozen=True)
class Captured:
    """Account of one run."""

    num_samples: int  # in the store, as examples ask for them
    num_resumed: int
    num_tokens: int  # read by the target in this run, in all processes


def capture(
    capturer: Capturer,
    examples: Sequence[Example],
    path: str | Path,
    *,
    batch_tokens: int = 4096,
    progress: bool = True,
    processes: Processes | None = None,
) -> Captured:
    """Store a sample for every example, in their order; what is there already is kept.

    Args:
        capturer: holds the target.
        examples: any number.
        path: the store's folder.
        batch_tokens: of one forward pass, padding included.
        progress: show it.
        processes: each captures its share into shards of its own; none = those of the environment.

    Raises:
        UserError: the store there is of another target or kind, or a state is not finite.
    """
    processes = processes or Processes()
    keys = [sample_key(example.input_ids, example.loss_mask) for example in examples]
    unique = dict(zip(keys, examples, strict=True))
    with processes.main_first():  # it makes the store that the others open
        writer = StoreWriter(path, capturer.meta, capturer.head(), writer=processes.rank)
    processes.wait()  # all know the same samples before one of them adds any
    missing = [example for key, example in unique.items() if key not in writer]
    lengths = [len(example.input_ids) for example in missing]
    if capturer.is_sliced:  # all read everything, one writes
        mine = list(range(len(missing)))
    else:
        mine = share(range(len(missing)), lengths, processes.count)[processes.rank]
    writes = processes.is_main or not capturer.is_sliced
    captured = 0
    with writer, display("capture", len(mine), progress) as bar:
        for batch in batches([missing[i] for i in mine], batch_tokens):
            samples, mass = capturer.run(batch)
            if writes:
                writer.add(samples, mass)
            captured += len(batch)
            bar.update(captured)
    processes.wait_long()
    if processes.is_main:
        writer.finish(keys)
    processes.wait()
    return Captured(len(keys), len(unique) - len(missing), sum(lengths))


def capture_rolling(
    capturer: Capturer,
    examples: Sequence[Example],
    path: Path,
    *,
    batch_tokens: int,
    max_bytes: int,
    begun: Callable[[], None],
    progress: bool = True,
) -> Captured:
    """Store a sample for every example for a reader that consumes them, never more than fits.

    Args:
        capturer: holds the target.
        examples: none twice, in the order in which they are trained on.
        path: the store's folder.
        batch_tokens: of one forward pass, padding included.
        max_bytes: of all shards together.
        begun: called once a reader can open the store.
        progress: show it.
    """
    keys = [sample_key(example.input_ids, example.loss_mask) for example in examples]
    lengths = [len(example.input_ids) for example in examples]
    rolling = RollingWriter(path, capturer.meta, capturer.head(), keys, max_bytes)
    begun()
    wanted = [i for i, key in enumerate(keys) if rolling.is_wanted(key)]
    captured = 0
    with rolling.writer, display("capture", len(wanted), progress) as bar:
        for group in pack(wanted, lengths, batch_tokens):
            rolling.wait_for_room()
            if rolling.is_wanted(keys[group[-1]]):  # a fit of few steps does not take them all
                rolling.writer.add(*capturer.run([examples[i] for i in group]))
            captured += len(group)
            bar.update(captured)
    return Captured(len(keys), len(keys) - len(wanted), sum(lengths[i] for i in wanted))


def batches(examples: Sequence[Example], batch_tokens: int) -> Iterator[list[Example]]:
    """Examples of similar length together, longest first; at least one a batch."""
    queue = sorted(examples, key=lambda example: -len(example.input_ids))
    while queue:
        size = max(1, batch_tokens // len(queue[0].input_ids))
        yield queue[:size]
        queue = queue[size:]


def asked_positions(loss_mask: Tensor) -> Tensor:
    """[S] bool: positions whose next-token distribution any loss convention can ask for.

    The strict rule asks at p where token p+1 is supervised. Rules that do not shift the mask
    (SpecForge, EAGLE) ask where token p or p-1 is.
    """
    asked = loss_mask.clone()
    asked[:-1] |= loss_mask[1:]
    asked[1:] |= loss_mask[:-1]
    return asked


def _whole_head(target: Target) -> Tensor:
    """[V,T] on one device, whatever the placement."""
    weight = target.lm_head.detach()
    if isinstance(weight, DTensor):
        return weight.full_tensor()
    if weight.is_meta:
        raise UserError(
            f"target {target.name}: no room for its lm_head on a device; use more devices, or "
            "capture.placement tensor_parallel"
        )
    return weight


def _input_device(target: Target) -> torch.device:
    weight = target.model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    # An embedding that accelerate keeps elsewhere fetches its input itself.
    return torch.device("cpu") if weight.is_meta else weight.device


@torch.no_grad()
def _check_plain_head(target: Target, weight: Tensor) -> None:
    """Teacher probabilities are recomputed from state and head alone: nothing may follow them."""
    head = target.model.get_output_embeddings()
    ids = torch.arange(min(16, target.vocab_size), device=_input_device(target))[None]
    with capture_final(target.model) as last:
        logits = target.model(input_ids=ids, use_cache=False).logits
        expected = last.states()[0].to(weight.device) @ weight.T
    if getattr(head, "bias", None) is not None or not torch.allclose(
        logits.to(weight.device).float(), expected.float(), rtol=1e-3, atol=1e-3
    ):
        raise UserError(
            f"target {target.name}: its logits are not its lm_head times its last state (a bias, "
            "scaling or soft cap follows); a draft cannot be trained on it"
        )
