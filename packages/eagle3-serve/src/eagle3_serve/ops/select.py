"""Which implementation of the ops runs: said by name, or chosen for a device and logged once."""

import logging
from typing import Literal

import torch

from eagle3_core import UserError

Implementation = Literal["auto", "reference", "triton"]

_log = logging.getLogger(__name__)
_said: set[tuple[str, str]] = set()


def resolve(implementation: Implementation, device: torch.device) -> Literal["reference", "triton"]:
    """`auto` is triton on a GPU and the reference elsewhere; a name is taken at its word.

    Raises:
        UserError: triton is asked for where its kernels cannot run.
    """
    if implementation == "reference":
        return "reference"
    if implementation == "triton":
        if device.type != "cuda" and not _is_interpreted():
            raise UserError(
                f"ops: implementation is 'triton', but {device} is no GPU; use 'auto' or "
                "'reference', or set TRITON_INTERPRET=1 to run the kernels in Triton's interpreter"
            )
        return "triton"
    chosen = "triton" if device.type == "cuda" else "reference"
    if (chosen, str(device)) not in _said:
        _said.add((chosen, str(device)))
        _log.info("ops on %s: %s", device, chosen)
    return chosen


def _is_interpreted() -> bool:
    # Only where somebody asks: Triton is not there on every system.
    from triton import knobs  # noqa: PLC0415

    return bool(knobs.runtime.interpret)
