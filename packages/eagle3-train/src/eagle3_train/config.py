"""The run's configuration: one strict schema, read from YAML plus dotted overrides."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from eagle3_core import UserError
from eagle3_core.config import AuxNorm, Feedback, LayerInput, Residual

Dtype = Literal["float32", "bfloat16"]
StoreDtype = Literal["float32", "bfloat16", "float8_e4m3"]
Placement = Literal["single", "device_map", "tensor_parallel"]
LossConvention = Literal["strict", "specforge", "speculators", "eagle"]
LossTerm = Literal["soft_ce", "kl", "tv", "lk_alpha", "lk_lambda"]
StrategyName = Literal["ddp", "fsdp2", "zero2", "zero3"]
Tracker = Literal["tensorboard", "wandb"]

COMPUTED_STARTS = ("random", "least_squares")  # values of draft.init that name no other draft

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """Unknown keys, wrong types and later assignment are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class DataConfig(Section):
    """Conversations to learn from and to hold out: files, folders or `datasets` ids."""

    train: list[str] = []
    eval: list[str] = []
    max_length: Count = 2048  # tokens of one sample
    chat_template: str | None = None  # a file that replaces the tokenizer's template
    template_arguments: dict[str, Any] = {}  # further variables of it, such as enable_thinking
    strict: bool = False  # an unusable row ends the run instead of being counted and named


class RegenerateConfig(Section):
    """The target answers prompts, so that the draft learns what the target says."""

    prompts: list[str] = []
    max_tokens: Count = 128
    temperature: NonNegative = 0.0
    samples_per_prompt: Count = 1
    batch_size: Count = 32
    dtype: Dtype = "float32"


class CaptureConfig(Section):
    """The target's states for every sample."""

    mode: Literal["offline", "online"] = "offline"
    placement: Placement = "single"  # where a target goes that does not fit one device
    dtype: Dtype = "float32"  # of the target's arithmetic
    store_dtype: StoreDtype = "bfloat16"  # of the states on disk
    aux_layer_ids: list[int] | None = None  # boundary ids; none = 2, n//2, n-3
    batch_tokens: Count = 4096
    # States of data.train on disk at a time: capture and fit run together, for one epoch.
    max_disk_gib: Positive | None = None


class DraftSection(Section):
    """The draft to train; what is none is taken from the target."""

    num_hidden_layers: Count = 1
    vocab_size: Count | None = None  # draft vocabulary; none = the target's, unpruned
    hidden_size: Count | None = None
    intermediate_size: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Count | None = None
    sliding_window: Count | None = None
    layer_input: LayerInput = "first"
    aux_norm: AuxNorm = "none"
    residual: Residual = "raw"
    feedback: Feedback = "pre_norm"
    # Where the weights start: random, least_squares, or the folder or hub id of another draft,
    # from which everything that is not stated here is taken too.
    init: Name = "random"

    @property
    def inherits(self) -> bool:
        """Whether `init` names a draft."""
        return self.init not in COMPUTED_STARTS


class TttRamp(Section):
    """The unroll grows from `start` steps to `ttt_length`, evenly over `share` of the run."""

    start: Count = 1
    share: Annotated[float, Field(gt=0, le=1)] = 0.5


def _weights_of(loss: object) -> object:
    """The name of one term is that term alone."""
    return {loss: 1.0} if isinstance(loss, str) else loss


Loss = Annotated[dict[LossTerm, Positive], Field(min_length=1), BeforeValidator(_weights_of)]


class FitConfig(Section):
    """The training loop. Sizes are of the whole step: all processes together."""

    ttt_length: Count = 5  # T, steps of the unroll
    step_weight: Positive = 0.8  # the loss of step k weighs step_weight ** k
    ttt_ramp: TttRamp | None = None
    loss: Loss = {"soft_ce": 1.0}  # one term's name, or terms with weights
    loss_convention: LossConvention = "strict"
    batch_tokens: Count = 4096  # tokens of one optimiser step
    micro_batch_tokens: Count = 2048  # tokens of one forward and backward pass
    epochs: Count = 1
    max_steps: Count | None = None  # ends sooner than `epochs` would
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: Positive = 1e-4
    betas: list[Fraction] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    weight_decay: NonNegative = 0.0
    clip_norm: Positive = 0.5
    warmup_ratio: Fraction = 0.03
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    decay_ratio: Fraction = 0.2  # of the run, at its end, where `wsd` decays
    dtype: Dtype = "float32"  # bfloat16 = autocast; weights and optimiser stay float32
    gradient_checkpointing: bool = False  # keep less of each unroll step and run it twice
    train_embeddings: bool = False
    train_head: bool = True
    save_every: Count | None = None  # steps between checkpoints; none = only the end
    keep: Count = 2  # checkpoints kept
    trackers: list[Tracker] = []  # beside metrics.jsonl

    @model_validator(mode="after")
    def _ramp_starts_below(self) -> Self:
        if self.ttt_ramp is not None and self.ttt_ramp.start > self.ttt_length:
            raise ValueError(
                f"ttt_ramp.start is {self.ttt_ramp.start}, expected at most ttt_length "
                f"{self.ttt_length}"
            )
        return self


class EvalConfig(Section):
    """The simulated accept length on held-out samples."""

    num_speculative_tokens: Count = 5  # K, of a chain and of a tree's depth
    topk: Count = 4  # children of a tree's node, and nodes expanded at every depth
    num_verify_tokens: Annotated[int, Field(ge=2)] = 16  # of a tree, root included
    every: Count | None = None  # steps between evaluations during fit; none = only `eval`
    batch_tokens: Count = 4096


class TrainConfig(Section):
    """Everything a run depends on."""

    output: Name
    target: Name
    seed: Annotated[int, Field(ge=0)] = 0
    data: DataConfig = DataConfig()
    regenerate: RegenerateConfig = RegenerateConfig()
    capture: CaptureConfig = CaptureConfig()
    draft: DraftSection = DraftSection()
    fit: FitConfig = FitConfig()
    eval: EvalConfig = EvalConfig()

    @property
    def out(self) -> Path:
        """The folder everything is written to."""
        return Path(self.output)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML file, apply `section.key=value` overrides (YAML-typed values), validate.

    Raises:
        UserError: one line with the file (or the override), the dotted key, what was found and
            what is expected.
    """
    values = _read_yaml(Path(path))
    overridden = [_apply_override(values, text) for text in overrides]
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        raise UserError(_describe(error, str(path), overridden)) from None


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers (1e-4 is a number) and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands twice", node.value[i][0].start_mark
                )
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    values = _parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise UserError(
            f"{path}: found {type(values).__name__}, expected a mapping with output, target, data"
        )
    return values


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{where}{at}: not YAML: {problem}") from None


def _apply_override(values: dict[str, Any], text: str) -> str:
    """Set one dotted key in place; returns the key."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise UserError(f"override {text!r}: expected section.key=value")
    *sections, leaf = key.split(".")
    for section in sections:
        child = values.setdefault(section, {})
        if child is None:
            child = values[section] = {}
        if not isinstance(child, dict):
            raise UserError(f"override {text!r}: {section!r} holds {child!r}, not a section")
        values = child
    values[leaf] = _parse_yaml(value, f"override {text!r}")
    return key


def _describe(error: ValidationError, path: str, overridden: Sequence[str]) -> str:
    errors = error.errors(include_url=False)
    first = errors[0]
    key = ".".join(str(part) for part in first["loc"] if part != "[key]")
    from_override = any(name == key or name.startswith(key + ".") for name in overridden)
    where = f"override {key}" if from_override else f"{path}: {key}"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{where}: {_problem(first)}{more}"


def _problem(error: ErrorDetails) -> str:
    if error["type"] == "missing":
        return "missing; give it a value"
    if error["type"] == "extra_forbidden":
        names = _known_keys(error["loc"][:-1])
        near = difflib.get_close_matches(str(error["loc"][-1]), names, n=1)
        return "unknown key; " + (
            f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(names))}"
        )
    if error["type"] == "model_type":
        names = _known_keys(error["loc"])
        return f"found {error['input']!r}, expected a section with keys such as {names[0]}"
    if error["type"] == "value_error":  # a rule between several keys
        return error["msg"].removeprefix("Value error, ")
    message = error["msg"].removeprefix("Input should be ")
    message = re.sub(r"^(List|String|Value) should have ", "", message)
    return f"found {error['input']!r}, expected {message}"


def _known_keys(section: Sequence[int | str]) -> list[str]:
    model: type[BaseModel] = TrainConfig
    for name in section:
        annotation = model.model_fields[str(name)].annotation
        options = get_args(annotation) or (annotation,)  # a section, or a section or none
        model = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return list(model.model_fields)
