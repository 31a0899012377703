"""Which samples make which optimiser step: a function of the seed and the epoch alone.

A step is the same set of samples on any number of processes; they only share it out.
"""

from collections.abc import Sequence

import torch


def epoch_batches(
    lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """Shuffle the samples, then cut the order into steps of at most `batch_tokens` tokens.

    A sample longer than that is a step of its own.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    return pack(order, lengths, batch_tokens)


def pack(indices: Sequence[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Cut a sequence of samples, in order, into groups of at most `tokens` tokens."""
    groups: list[list[int]] = []
    room = 0
    for index in indices:
        if not groups or lengths[index] > room:
            groups.append([])
            room = tokens
        groups[-1].append(index)
        room -= lengths[index]
    return groups


def share(indices: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Share samples out: longest first, each to the part with the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        part = loads.index(min(loads))
        shares[part].append(index)
        loads[part] += lengths[index]
    return shares
