"""The stage that stores the target's states."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_core.target import Target
from eagle3_train.capture import Captured, capture, capture_rolling
from eagle3_train.config import TrainConfig
from eagle3_train.display import console
from eagle3_train.outputs import check_outputs
from eagle3_train.processes import Processes
from eagle3_train.provenance import changed_inputs, is_current, record_inputs, recorded_inputs
from eagle3_train.resume import write_json
from eagle3_train.rolling import check_limit, check_rolling, in_order
from eagle3_train.stages.examples import data_splits, load_template, prepare_split
from eagle3_train.stages.features import (
    feature_inputs,
    feature_paths,
    is_rolling,
    make_capturer,
    origins,
    place_reader,
    sources_file,
)
from eagle3_train.store import remove_damaged


def run_capture(config: TrainConfig, verify: bool = False) -> dict[str, Any]:
    """The target's states for every example, into OUT/features/{train,eval}.

    Args:
        config: of the run.
        verify: read what is stored, and replace shards that are not what was written.
    """
    target: Target | None = None
    result = {}
    splits = data_splits(config)
    for split in splits:
        folder, record = feature_paths(config, split)
        check_outputs(folder.parent, files=(record.name,), folders=(folder.name,))
    processes = Processes()
    if config.capture.max_disk_gib:
        check_rolling(config, processes.count)
    for split in sorted(splits, key=lambda name: is_rolling(config, name)):  # that comes last
        folder, record = feature_paths(config, split)
        inputs = feature_inputs(config, split)
        if is_rolling(config, split):
            target = target or place_reader(config, processes)
            result[split] = {
                "output": str(folder),
                **vars(_capture_rolling(config, target, inputs)),
            }
            continue
        if processes.is_main and verify:
            _remove_damaged(folder, record)
        processes.wait_long()
        current = is_current(folder, record, inputs)
        processes.wait()  # all have looked before the first changes anything
        if current:
            result[split] = {"output": str(folder), "num_tokens": 0}
            continue
        target = target or place_reader(config, processes)
        done = _capture_split(config, split, target, processes, inputs)
        result[split] = {"output": str(folder), **vars(done)}
    return result


def _capture_split(
    config: TrainConfig,
    split: str,
    target: Target,
    processes: Processes,
    inputs: Mapping[str, Any],
) -> Captured:
    folder, record = feature_paths(config, split)
    capturer = make_capturer(config, target)  # refuses a target before anything is removed
    prepared = None
    if processes.is_main:
        prepared = prepare_split(config, split, target, load_template(config, target))
        changed = changed_inputs(recorded_inputs(record) or inputs, inputs)
        # Else the states of samples that stay are kept.
        if {"target", "target_files", "capture"} & set(changed):
            shutil.rmtree(folder, ignore_errors=True)
        record.unlink(missing_ok=True)
    processes.wait_long()
    if prepared is None:  # the first process has left it on disk
        prepared = prepare_split(config, split, target, load_template(config, target))
    for warning in prepared.warnings():
        console.print(warning, markup=False)
    batch_tokens = config.capture.batch_tokens
    done = capture(
        capturer, prepared.examples, folder, batch_tokens=batch_tokens, processes=processes
    )
    if processes.is_main:
        write_json(sources_file(config, split), {"sources": origins(prepared.examples)})
        record_inputs(record, inputs)
    return done


def _capture_rolling(config: TrainConfig, target: Target, inputs: Mapping[str, Any]) -> Captured:
    folder, record = feature_paths(config, "train")
    capturer = make_capturer(config, target)
    limit = check_limit(config, capturer.meta)
    prepared = prepare_split(config, "train", target, load_template(config, target))
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
