"""The stages of a run. Each reads what the one before left under OUT and skips what is finished."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_core import DraftConfig, Eagle3Draft, UserError, load_draft
from eagle3_core.checkpoint.write import check_destination
from eagle3_core.pair import check_pair
from eagle3_core.target import Target, load_target, outline_target
from eagle3_core.tree import TreeShape
from eagle3_train.build import build_draft, draft_config
from eagle3_train.capture import (
    Captured,
    Capturer,
    OnlineFeatures,
    capture,
    capture_rolling,
)
from eagle3_train.config import StrategyName, TrainConfig
from eagle3_train.data import (
    ChatTemplate,
    Example,
    Prepared,
    cached,
    choose_vocabulary,
    prepare,
    prepared_from,
    show,
)
from eagle3_train.display import console, display
from eagle3_train.evaluate import evaluate
from eagle3_train.fingerprint import fingerprint
from eagle3_train.inherit import draft_digest, find_draft, inherit_draft
from eagle3_train.outputs import check_outputs
from eagle3_train.placement import place_target
from eagle3_train.plan import Text, plan
from eagle3_train.processes import Processes
from eagle3_train.provenance import (
    changed_inputs,
    describe_run,
    hash_files,
    is_current,
    record_inputs,
    recorded_inputs,
)
from eagle3_train.regenerate import Sampling, regenerate
from eagle3_train.report import NAME as REPORT
from eagle3_train.report import length_histogram, write_report
from eagle3_train.resume import write_json
from eagle3_train.rolling import check_limit, check_rolling, in_order
from eagle3_train.simulate import Simulated, Simulator
from eagle3_train.store import FeatureStore, RollingStore, remove_damaged
from eagle3_train.strategies import check_strategy
from eagle3_train.trackers import check_trackers
from eagle3_train.trainer import Trainer
from eagle3_train.ttt import Batch, supervised_slots

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
}
Features = FeatureStore | OnlineFeatures | RollingStore

_ASSUMED_SUPERVISED = 0.5  # share of tokens, where the data is not there to be counted
_FREE = ("save_every", "keep", "trackers")  # fit settings that a continued run may change


def run_prepare(config: TrainConfig) -> dict[str, Any]:
    """Show what the data becomes; keeps it in OUT/prepared."""
    splits = _splits(config)
    check_outputs(config.out / "prepared", files=tuple(f"{s}.safetensors" for s in splits))
    target = load_target(config.target)
    template = _template(config, target)
    result = {}
    for split, sources in splits.items():
        prepared = _prepare(config, split, sources, target, template)
        show(prepared, template, console)
        result[split] = {
            "examples": len(prepared.examples),
            "rows": prepared.num_rows,
            "tokens": prepared.num_tokens,
            "supervised_fraction": prepared.supervised_fraction,
            "dropped": prepared.drops.by_reason(),
            "sources": {name: vars(counts) for name, counts in prepared.sources.items()},
        }
    return result


def run_regenerate(config: TrainConfig) -> dict[str, Any]:
    """The target answers `regenerate.prompts` into OUT/regenerated.jsonl."""
    section = config.regenerate
    if not section.prompts:
        raise UserError("regenerate.prompts is empty, expected files of prompts")
    output = config.out / "regenerated.jsonl"
    record = config.out / "regenerated.inputs.json"
    check_outputs(config.out, files=(output.name, record.name))
    inputs = {
        "target": config.target,
        "target_files": fingerprint(config.target),
        "seed": config.seed,
        "regenerate": section.model_dump(exclude={"batch_size"}),
        "chat_template": config.data.chat_template,
        **_template_arguments(config),
        "files": hash_files([*section.prompts, *_template_files(config)]),
    }
    finished = recorded_inputs(record) if output.exists() else None
    if finished is not None and not changed_inputs(finished, inputs):
        console.print(f"{output} is complete", markup=False)
        return {"output": str(output), "answered": 0}
    target = place_target(config.target, _DTYPES[section.dtype], "single", Processes())
    template = _template(config, target)
    if finished is not None and _answers_in_another_way(finished, inputs):
        _set_aside(output, record, changed_inputs(finished, inputs))
    sampling = Sampling(section.max_tokens, section.temperature, seed=config.seed)
    result = regenerate(
        target,
        template,
        section.prompts,
        output,
        sampling,
        samples_per_prompt=section.samples_per_prompt,
        greedy_first=section.samples_per_prompt > 1,
        batch_size=section.batch_size,
        strict=config.data.strict,
    )
    record_inputs(record, inputs)
    return {
        "output": str(output),
        "answered": result.num_answered,
        "resumed": result.num_resumed,
        "cut": result.num_cut,
        "tokens": result.num_tokens,
        "tokens_per_s": result.tokens_per_s,
    }


def run_capture(config: TrainConfig, verify: bool = False) -> dict[str, Any]:
    """The target's states for every example, into OUT/features/{train,eval}.

    Args:
        config: of the run.
        verify: read what is stored, and replace shards that are not what was written.
    """
    target: Target | None = None
    result = {}
    splits = _splits(config)
    for split in splits:
        folder, record = _feature_paths(config, split)
        check_outputs(folder.parent, files=(record.name,), folders=(folder.name,))
    processes = Processes()
    if config.capture.max_disk_gib:
        check_rolling(config, processes.count)
    for split in sorted(splits, key=lambda name: _is_rolling(config, name)):  # that comes last
        folder, record = _feature_paths(config, split)
        inputs = _feature_inputs(config, split)
        if _is_rolling(config, split):
            target = target or _reader(config, processes)
            result[split] = {"output": str(folder), **vars(_capture_rolling(config, target))}
            continue
        if processes.is_main and verify:
            _remove_damaged(folder, record)
        processes.wait_long()
        current = is_current(folder, record, inputs)
        processes.wait()  # all have looked before the first changes anything
        if current:
            result[split] = {"output": str(folder), "num_tokens": 0}
            continue
        target = target or _reader(config, processes)
        done = _capture_split(config, split, target, processes)
        result[split] = {"output": str(folder), **vars(done)}
    return result


def _capture_split(
    config: TrainConfig, split: str, target: Target, processes: Processes
) -> Captured:
    folder, record = _feature_paths(config, split)
    sources = _splits(config)[split]
    inputs = _feature_inputs(config, split)
    capturer = _capturer(config, target)  # refuses a target before anything is removed
    prepared = None
    if processes.is_main:
        prepared = _prepare(config, split, sources, target, _template(config, target))
        changed = changed_inputs(recorded_inputs(record) or inputs, inputs)
        # Else the states of samples that stay are kept.
        if {"target", "target_files", "capture"} & set(changed):
            shutil.rmtree(folder, ignore_errors=True)
        record.unlink(missing_ok=True)
    processes.wait_long()
    if prepared is None:  # the first process has left it on disk
        prepared = _prepare(config, split, sources, target, _template(config, target))
    for warning in prepared.warnings():
        console.print(warning, markup=False)
    batch_tokens = config.capture.batch_tokens
    done = capture(
        capturer, prepared.examples, folder, batch_tokens=batch_tokens, processes=processes
    )
    if processes.is_main:
        write_json(_sources_file(config, split), {"sources": _origins(prepared.examples)})
        record_inputs(record, inputs)
    return done


def _capture_rolling(config: TrainConfig, target: Target) -> Captured:
    folder, record = _feature_paths(config, "train")
    inputs = _feature_inputs(config, "train")
    capturer = _capturer(config, target)
    limit = check_limit(config, capturer.meta)
    sources = _splits(config)["train"]
    prepared = _prepare(config, "train", sources, target, _template(config, target))
    if changed_inputs(recorded_inputs(record) or {}, inputs):
        shutil.rmtree(folder, ignore_errors=True)
        record.unlink(missing_ok=True)
    console.print("capture goes on as eagle3-train fit consumes; start it beside this")
    return capture_rolling(
        capturer,
        in_order(prepared.examples, config.seed),
        folder,
        batch_tokens=config.capture.batch_tokens,
        max_bytes=limit,
        begun=lambda: record_inputs(record, inputs),
    )


def _remove_damaged(folder: Path, record: Path) -> None:
    """What is removed is captured again, since its record goes too."""
    if not (folder / "index.json").exists():
        return
    faults = remove_damaged(folder)
    for fault in faults:
        console.print(f"{fault}; the shard is removed", markup=False)
    if faults:
        record.unlink(missing_ok=True)
    else:
        console.print(f"{folder}: every sample is as it was written", markup=False)


def run_fit(
    config: TrainConfig, argv: Sequence[str], strategy: StrategyName = "ddp"
) -> dict[str, Any]:
    """Train the draft: OUT/draft, OUT/checkpoints, OUT/metrics.jsonl, OUT/run.json."""
    check_strategy(strategy, config.fit)
    _check_fit_outputs(config.out)
    check_trackers(config.fit.trackers)
    train = _features(config, "train")
    identity = {
        "target": config.target,
        "target_files": fingerprint(config.target),
        "seed": config.seed,
        **_draft_identity(config),
        "fit": config.fit.model_dump(exclude=set(_FREE)),
        "features": _feature_inputs(config, "train"),
    }
    draft_folder = config.out / "draft"
    record = config.out / "draft.inputs.json"
    if is_current(draft_folder, record, identity):
        return {"output": str(draft_folder), "num_steps": 0}
    draft = new_draft(config, train)
    _check_supervised(config, draft, train)
    held_out = _features(config, "eval") if config.eval.every else None
    replaced = recorded_inputs(record)
    trainer = Trainer(config, draft, train, held_out, train.head(), identity, replaced, strategy)
    if trainer.is_main:
        described = describe_run(argv, config.seed, identity)
        described |= {"config": config.model_dump(), "samples": length_histogram(train.lengths)}
        write_json(config.out / "run.json", described)
    outcome = trainer.run()
    steps = outcome.progress.step
    result = {"output": str(draft_folder), "num_steps": steps, **outcome.metrics}
    if trainer.is_main:
        console.print(f"the run in pictures: {write_report(config.out)}", markup=False)
    if outcome.interrupted:
        console.print(f"stopped after step {steps}; the same command continues")
        return result | {"interrupted": True}
    trainer.save()
    if trainer.is_main:
        if isinstance(train, RollingStore):
            train.release(len(train))
        record_inputs(record, identity)
    return result


def run_eval(config: TrainConfig, draft_folder: str | None) -> dict[str, Any]:
    """Accept lengths of OUT/draft (or another), simulated on the held-out samples: OUT/eval.json.

    Another draft's are only returned.
    """
    section = config.eval
    tree = _tree_shape(config)
    store = _features(config, "eval")
    folder = Path(draft_folder) if draft_folder else config.out / "draft"
    loaded = load_draft(folder)
    _check_belongs(loaded.config, folder, store)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    draft, head = loaded.draft.to(device), store.head().float().to(device)
    simulator = Simulator(draft, head, tree)
    datasets: dict[str, Simulated] = {}
    with display("eval", len(store)) as bar:
        for done, name in enumerate(_sources(config, "eval", store)):
            found = simulator.run(store[done])
            datasets[name] = datasets[name] + found if name in datasets else found
            bar.update(done + 1)
    counts = evaluate(
        draft,
        store,
        range(len(store)),
        simulator.kept_head,
        section.num_speculative_tokens,
        section.batch_tokens,
    )
    result = {
        "draft": str(folder),
        "samples": len(store),
        "num_speculative_tokens": section.num_speculative_tokens,
        "topk": section.topk,
        "num_verify_tokens": section.num_verify_tokens,
        **counts.summary(),
        "datasets": [{"name": name, **found.summary()} for name, found in datasets.items()],
    }
    if draft_folder is None:
        write_json(config.out / "eval.json", result)
        write_report(config.out)
    return result


def run_plan(
    config: TrainConfig,
    *,
    tokens: int | None,
    num_processes: int,
    strategy: StrategyName,
    device: str | None,
) -> dict[str, Any]:
    """Predict memory, disk and hours; writes nothing and loads no weights.

    Args:
        config: of the run.
        tokens: of the training data; None = read it.
        num_processes: that share a step.
        strategy: how they share weights and optimiser.
        device: one of `plan.DEVICES`; None = this machine.
    """
    target = outline_target(config.target)
    limit = min(config.data.max_length, target.max_position_embeddings)
    if tokens is None:
        sources = _splits(config)["train"]
        prepared = prepare(sources, _template(config, target), max_length=limit)
        mean = prepared.num_tokens / len(prepared.examples)
        text = Text(prepared.num_tokens, prepared.supervised_fraction, mean)
    else:
        text = Text(tokens, _ASSUMED_SUPERVISED, limit / 2)
    return plan(
        config,
        target,
        text,
        num_processes=num_processes,
        strategy=strategy,
        device=device,
    )


def _tree_shape(config: TrainConfig) -> TreeShape:
    section = config.eval
    try:
        return TreeShape(section.num_speculative_tokens, section.topk, section.num_verify_tokens)
    except ValueError as error:
        raise UserError(f"eval.{error}") from None


def new_draft(config: TrainConfig, store: Features) -> Eagle3Draft:
    """The draft a run starts from.

    Raises:
        UserError: sizes that contradict the target or the config.
    """
    target = load_target(config.target)
    if config.draft.inherits:
        folder = find_draft(config.draft.init)
        return inherit_draft(folder, config.draft, target, store.meta.aux_layer_ids, config.seed)
    if config.draft.init == "random" and not config.fit.train_head:
        raise UserError(
            "fit.train_head is false, expected true: with draft.init random the head is random; "
            "draft.init least_squares starts from the target's"
        )
    kept = _vocabulary(config, target, store)
    size = target.vocab_size if kept is None else len(kept)
    shape = draft_config(config.draft, target, store.meta.aux_layer_ids, size)
    return build_draft(shape, target, config.draft, kept, store, config.seed)


def _draft_identity(config: TrainConfig) -> dict[str, Any]:
    """What the run's config says of the draft, and which draft it starts from, if any."""
    if not config.draft.inherits:
        return {"draft": config.draft.model_dump()}
    folder = find_draft(config.draft.init)
    if folder.resolve() == (config.out / "draft").resolve():
        raise UserError(
            f"draft.init: {folder} is where this run writes its own draft; "
            "give the run another output folder"
        )
    # What is left out is the other draft's, not the default.
    stated = config.draft.model_dump(exclude_unset=True)
    return {"draft": stated, "init": draft_digest(folder)}


def _vocabulary(config: TrainConfig, target: Target, store: Features) -> Tensor | None:
    size = config.draft.vocab_size
    if size is None or size == target.vocab_size:
        return None
    examples = [Example(f"sample {i}", *store.tokens(i)) for i in range(len(store))]
    mass = store.target_mass() if isinstance(store, FeatureStore) else None
    return choose_vocabulary(
        examples, target.vocab_size, size, target_mass=mass, always=target.eos_token_ids
    )


def _check_fit_outputs(out: Path) -> None:
    """Before training, not after it."""
    files = ("metrics.jsonl", "run.json", "draft.inputs.json", REPORT)
    check_outputs(out, files=files, folders=("draft", "checkpoints"))
    check_destination(out / "draft")


def _check_supervised(config: TrainConfig, draft: Eagle3Draft, samples: Features) -> None:
    """Refuse data that would train nothing, such as answers outside the draft vocabulary."""
    t2d = draft.t2d if draft.config.is_pruned else None
    convention = config.fit.loss_convention
    if isinstance(samples, RollingStore) and samples.is_begun:
        return  # the run that began has asked
    for i in range(len(samples)):
        if supervised_slots(Batch.pack([samples[i]]), 1, t2d, convention).any():
            return
    size = draft.config.draft_vocab_size
    raise UserError(
        f"data.train: not one of {len(samples)} samples has a token to learn, which takes two "
        f"supervised tokens in a row and the target's choice among the {size} of the draft; "
        "train on longer answers or raise draft.vocab_size"
    )


def _answers_in_another_way(finished: Mapping[str, Any], inputs: Mapping[str, Any]) -> bool:
    """Whether more than the prompts changed: other prompts alone only add answers."""

    def way(values: Mapping[str, Any]) -> dict[str, Any]:
        section = {**values.get("regenerate", {}), "prompts": None}
        return {**values, "files": None, "regenerate": section}

    return bool(changed_inputs(way(finished), way(inputs)))


def _set_aside(output: Path, record: Path, changed: Sequence[str]) -> None:
    """Answers cost hours: the old ones are renamed, not removed."""
    kept = output.with_name("regenerated.previous.jsonl")
    record.unlink()
    os.replace(output, kept)
    console.print(
        f"{output}: made with other {', '.join(changed)}; made again, the old one is now {kept}",
        markup=False,
    )


def _splits(config: TrainConfig) -> dict[str, list[str]]:
    if not config.data.train:
        raise UserError("data.train is empty, expected files of conversations")
    splits = {"train": config.data.train, "eval": config.data.eval}
    return {name: sources for name, sources in splits.items() if sources}


def _prepare(
    config: TrainConfig,
    split: str,
    sources: Sequence[str],
    target: Target,
    template: ChatTemplate,
) -> Prepared:
    # Beyond its own limit the target's states mean nothing.
    limit = min(config.data.max_length, target.max_position_embeddings)
    strict = config.data.strict
    return cached(
        config.out / "prepared" / f"{split}.safetensors",
        prepared_from(sources, template, limit, strict),
        lambda: prepare(sources, template, max_length=limit, strict=strict),
    )


def _template_files(config: TrainConfig) -> list[str]:
    return [config.data.chat_template] if config.data.chat_template else []


def _template_arguments(config: TrainConfig) -> dict[str, Any]:
    arguments = config.data.template_arguments
    return {"template_arguments": arguments} if arguments else {}


def _template(config: TrainConfig, target: Target) -> ChatTemplate:
    data = config.data
    return ChatTemplate(
        target.tokenizer, data.chat_template, target.eos_token_ids, data.template_arguments
    )


def _reader(config: TrainConfig, processes: Processes) -> Target:
    section = config.capture
    return place_target(config.target, _DTYPES[section.dtype], section.placement, processes)


def _online_processes(config: TrainConfig) -> Processes:
    processes = Processes()
    if config.capture.placement == "tensor_parallel":
        # Each process trains on its own samples; the parts of a target have to read the same ones.
        raise UserError(
            "capture.placement is tensor_parallel with capture.mode online, expected offline: "
            "run eagle3-train capture, then fit"
        )
    return processes


def _capturer(config: TrainConfig, target: Target) -> Capturer:
    section = config.capture
    return Capturer(target, section.aux_layer_ids, _DTYPES[section.store_dtype])


def _feature_paths(config: TrainConfig, split: str) -> tuple[Path, Path]:
    """The folder of a split's states, and the record of what it was made from."""
    folder = config.out / "features" / split
    return folder, folder.with_name(f"{split}.inputs.json")


def _sources_file(config: TrainConfig, split: str) -> Path:
    """Which file each captured sample came from, in their order."""
    return config.out / "features" / f"{split}.sources.json"


def _origins(examples: Sequence[Example]) -> list[str]:
    return [example.where.rpartition(":")[0] for example in examples]


def _sources(config: TrainConfig, split: str, store: Features) -> list[str]:
    """[samples]: the file or data set of each; one name for all if the capture did not say."""
    if isinstance(store, OnlineFeatures):
        return _origins(store.examples)
    found = recorded_inputs(_sources_file(config, split)) or {}
    return found.get("sources") or [f"data.{split}"] * len(store)


def _feature_inputs(config: TrainConfig, split: str) -> dict[str, Any]:
    return {
        "target": config.target,
        "target_files": fingerprint(config.target),
        "capture": config.capture.model_dump(
            exclude={"batch_tokens", "mode", "placement", "max_disk_gib"}
        ),
        "data": {
            **config.data.model_dump(include={"max_length", "chat_template"}),
            **_template_arguments(config),
        },
        "files": hash_files([*_splits(config)[split], *_template_files(config)]),
        # In the order of training, and gone when read.
        **({"rolling": config.seed} if _is_rolling(config, split) else {}),
    }


def _is_rolling(config: TrainConfig, split: str) -> bool:
    return split == "train" and config.capture.max_disk_gib is not None


def _features(config: TrainConfig, split: str) -> Features:
    """The samples of a split: captured before, or made on the fly."""
    sources = _splits(config).get(split)
    if sources is None:
        raise UserError(f"data.{split} is empty, expected files of conversations")
    if config.capture.mode == "online":
        target = _reader(config, _online_processes(config))
        prepared = _prepare(config, split, sources, target, _template(config, target))
        return OnlineFeatures(_capturer(config, target), prepared.examples)
    folder, record = _feature_paths(config, split)
    found = recorded_inputs(record)
    changed = changed_inputs(found or {}, _feature_inputs(config, split))
    if changed:
        made = f" (made with other {', '.join(changed)})" if found else ""
        raise UserError(
            f"{folder}: no states of the data.{split} of this config{made}; "
            "run eagle3-train capture with it first"
        )
    if not _is_rolling(config, split):
        return FeatureStore(folder)
    check_rolling(config, 1)
    target = load_target(config.target)
    prepared = _prepare(config, split, sources, target, _template(config, target))
    return RollingStore(folder, in_order(prepared.examples, config.seed))


def _check_belongs(config: DraftConfig, folder: Path, store: Features) -> None:
    meta = store.meta
    check_pair(
        folder,
        config,
        meta.target,
        vocab_size=meta.vocab_size,
        hidden_size=meta.hidden_size,
        num_layers=meta.num_target_layers,
    )
    if (config.aux_layer_ids or meta.aux_layer_ids) != meta.aux_layer_ids:
        raise UserError(
            f"{folder}: aux_layer_ids is {list(config.aux_layer_ids or ())}, but the captured "
            f"states are of {list(meta.aux_layer_ids)}; capture those that the draft reads"
        )
