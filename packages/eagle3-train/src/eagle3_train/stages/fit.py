"""The stage that trains the draft."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3_core import Eagle3Draft, UserError
from eagle3_core.checkpoint.write import check_destination
from eagle3_core.target import Target, load_target
from eagle3_train.build import build_draft, draft_config
from eagle3_train.config import StrategyName, TrainConfig
from eagle3_train.data import Example, choose_vocabulary
from eagle3_train.display import console
from eagle3_train.inherit import draft_digest, find_draft, inherit_draft
from eagle3_train.outputs import check_outputs
from eagle3_train.provenance import describe_run, is_current, record_inputs, recorded_inputs
from eagle3_train.report import NAME as REPORT
from eagle3_train.report import length_histogram, write_report
from eagle3_train.resume import write_json
from eagle3_train.stages.features import Features, feature_inputs, open_features
from eagle3_train.store import FeatureStore, RollingStore
from eagle3_train.strategies import check_strategy
from eagle3_train.trackers import check_trackers
from eagle3_train.trainer import Trainer
from eagle3_train.ttt import Batch, supervised_slots

_FREE = ("save_every", "keep", "trackers")  # fit settings that a continued run may change


def run_fit(
    config: TrainConfig, argv: Sequence[str], strategy: StrategyName = "ddp"
) -> dict[str, Any]:
    """Train the draft: OUT/draft, OUT/checkpoints, OUT/metrics.jsonl, OUT/run.json."""
    check_strategy(strategy, config.fit)
    _check_fit_outputs(config.out)
    check_trackers(config.fit.trackers)
    train = open_features(config, "train")
    features = feature_inputs(config, "train")
    identity = {
        "target": config.target,
        "target_files": features["target_files"],
        "seed": config.seed,
        **_draft_identity(config),
        "fit": config.fit.model_dump(exclude=set(_FREE)),
        "features": features,
    }
    draft_folder = config.out / "draft"
    record = config.out / "draft.inputs.json"
    if is_current(draft_folder, record, identity):
        return {"output": str(draft_folder), "num_steps": 0}
    draft = new_draft(config, train)
    _check_supervised(config, draft, train)
    held_out = open_features(config, "eval") if config.eval.every else None
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
