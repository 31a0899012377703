"""The stage in which the target answers prompts."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_core import UserError
from eagle3_core.fingerprint import fingerprint
from eagle3_train.config import TrainConfig
from eagle3_train.display import console
from eagle3_train.outputs import check_outputs
from eagle3_train.placement import place_target
from eagle3_train.processes import Processes
from eagle3_train.provenance import changed_inputs, hash_files, record_inputs, recorded_inputs
from eagle3_train.regenerate import Sampling, regenerate
from eagle3_train.stages.examples import load_template, template_arguments, template_files
from eagle3_train.stages.features import DTYPES


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
        **template_arguments(config),
        "files": hash_files([*section.prompts, *template_files(config)]),
    }
    finished = recorded_inputs(record) if output.exists() else None
    if finished is not None and not changed_inputs(finished, inputs):
        console.print(f"{output} is complete", markup=False)
        return {"output": str(output), "answered": 0}
    target = place_target(config.target, DTYPES[section.dtype], "single", Processes())
    template = load_template(config, target)
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
