"""The store gives back what it was given, and refuses what is not that."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_core import UserError
from eagle3_train.store import (
    FeatureStore,
    Sample,
    StoreMeta,
    StoreWriter,
    fp8,
    remove_damaged,
    sample_key,
)

T, V, A = 4, 10, 3
META = StoreMeta("target", 8, T, V, "digest", (1, 3, 5), "float32", "float32")
HEAD = torch.arange(V * T, dtype=torch.float32).view(V, T)
MASS = torch.ones(V, dtype=torch.float64)
FIELDS = ("input_ids", "loss_mask", "aux", "final", "argmax", "logz")


def _sample(seed: int, length: int = 8, dtype: torch.dtype = torch.float32) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    return Sample(
        input_ids=torch.randint(V, (length,), generator=generator),
        loss_mask=torch.rand(length, generator=generator) > 0.5,
        aux=torch.randn(length, A * T, generator=generator).to(dtype),
        final=torch.randn(length, T, generator=generator).to(dtype),
        argmax=torch.randint(V, (length,), generator=generator, dtype=torch.int32),
        logz=torch.randn(length, generator=generator),
    )


SAMPLES = [_sample(i, length) for i, length in enumerate((8, 3, 5, 8))]


def _key(sample: Sample) -> str:
    return sample_key(sample.input_ids, sample.loss_mask)


def _write(path: Path, samples: list[Sample], shard_bytes: int = 2**20) -> None:
    with StoreWriter(path, META, HEAD, shard_bytes) as writer:
        for sample in samples:
            writer.add([sample], MASS)
        writer.finish([_key(sample) for sample in samples])


def _edit_shard(path: Path, name: str, at: tuple[int, ...], value: float) -> None:
    """Change one number in the only shard; size and samples stay."""
    file = path / "shard-0-00000.safetensors"
    tensors = load_file(file)
    tensors[name][at] = value
    metadata = {"samples": _metadata(file)}
    save_file(tensors, file, metadata=metadata)


def _metadata(file: Path) -> str:
    header = file.read_bytes()
    size = int.from_bytes(header[:8], "little")
    return json.loads(header[8 : 8 + size])["__metadata__"]["samples"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_bytes", [1, 1500, 2**20])
def test_what_was_stored_comes_back_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, shard_bytes: int
) -> None:
    samples = [_sample(i, length, dtype) for i, length in enumerate((8, 3, 5, 1))]
    _write(tmp_path, samples, shard_bytes)
    store = FeatureStore(tmp_path)
    assert (len(store), store.lengths, store.meta) == (4, [8, 3, 5, 1], META)
    for i, sample in enumerate(samples):
        for name in FIELDS:
            stored, given = getattr(store[i], name), getattr(sample, name)
            assert stored.dtype == given.dtype
            assert stored.equal(given)
    assert store.head().equal(HEAD)
    assert store.target_mass().equal(4 * MASS)


def test_an_interrupted_writer_leaves_its_whole_shards(tmp_path: Path) -> None:

    def interrupted() -> None:
        with StoreWriter(tmp_path, META, HEAD, shard_bytes=500) as writer:
            writer.add(SAMPLES[:2], MASS)  # fills a shard
            writer.add(SAMPLES[2:3], MASS)  # lost
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(UserError, match=r"capture has not finished \(2 samples so far\)"):
        FeatureStore(tmp_path)
    (tmp_path / "shard-0-00001.safetensors").write_bytes(
        b"torn"
    )  # renamed, but not in the index yet
    with StoreWriter(tmp_path, META, HEAD) as writer:
        assert [_key(sample) in writer for sample in SAMPLES] == [True, True, False, False]
        writer.add(SAMPLES, MASS)
        writer.finish([_key(sample) for sample in reversed(SAMPLES)])
    store = FeatureStore(tmp_path)
    for i, sample in enumerate(reversed(SAMPLES)):
        assert store[i].aux.equal(sample.aux)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("name", "at"), [("aux", (11, 2)), ("final", (11, 2)), ("logz", (11,))])
def test_a_number_that_is_not_finite_is_named(
    tmp_path: Path, name: str, at: tuple[int, ...], value: float
) -> None:
    """Token 11 of the shard is token 0 of row 2."""
    _write(tmp_path, SAMPLES)
    _edit_shard(tmp_path, name, at, value)
    store = FeatureStore(tmp_path)
    assert store[1].aux.equal(SAMPLES[1].aux)
    where = "0, 2" if len(at) == 2 else "0"
    with pytest.raises(UserError, match=rf"00000\.safetensors: row 2: {name}\[{where}\] is "):
        store[2]


def test_states_of_other_tokens_are_refused(tmp_path: Path) -> None:
    _write(tmp_path, SAMPLES)
    _edit_shard(tmp_path, "input_ids", (12,), (int(SAMPLES[2].input_ids[1]) + 1) % V)
    with pytest.raises(UserError, match="row 2: holds the tokens of another sample"):
        FeatureStore(tmp_path)[2]


def test_states_that_are_all_zero_are_suspicious(tmp_path: Path) -> None:
    zero = replace(SAMPLES[0], final=SAMPLES[0].final.clone())
    zero.final[3] = 0
    _write(tmp_path, [zero])
    with pytest.warns(UserWarning, match=r"row 0: final\[3\] is all zero, suspicious"):
        FeatureStore(tmp_path)[0]


def test_a_cut_or_missing_shard_is_named(tmp_path: Path) -> None:
    _write(tmp_path, SAMPLES)
    file = tmp_path / "shard-0-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(UserError, match=r"shard-0-00000\.safetensors: has \d+ bytes, index\.json"):
        FeatureStore(tmp_path)
    file.unlink()
    with pytest.raises(UserError, match=r"shard-0-00000\.safetensors: is missing"):
        FeatureStore(tmp_path)


def test_a_shard_of_another_store_is_named(tmp_path: Path) -> None:
    _write(tmp_path / "a", [SAMPLES[0]])
    _write(tmp_path / "b", [SAMPLES[3]])  # as long, so the file is as big
    shutil.copy(tmp_path / "b" / "shard-0-00000.safetensors", tmp_path / "a")
    with pytest.raises(UserError, match="holds other samples than index"):
        FeatureStore(tmp_path / "a")


def test_a_shard_with_fewer_positions_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, SAMPLES[:1])
    file = tmp_path / "shard-0-00000.safetensors"
    tensors = load_file(file)
    tensors["aux"] = tensors["aux"][:7].clone()
    save_file(tensors, file, metadata={"samples": _metadata(file)})
    with pytest.raises(UserError, match=r"shard-0-00000\.safetensors"):
        FeatureStore(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 9}'])
def test_what_is_no_store_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"index\.json: cannot be read"):
        FeatureStore(tmp_path)
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(UserError, match=r"index\.json: (is not the index|format is 9)"):
        FeatureStore(tmp_path)


def test_the_head_of_another_target_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, SAMPLES)
    save_file({"head": torch.zeros(V, T + 1)}, tmp_path / "head.safetensors")
    with pytest.raises(UserError, match=r"head\.safetensors: head is \[10, 5\], index\.json says"):
        FeatureStore(tmp_path).head()


def test_one_flipped_bit_is_found_and_replaced(tmp_path: Path) -> None:
    _write(tmp_path, SAMPLES, shard_bytes=600)
    files = sorted(file.name for file in tmp_path.glob("shard-*"))
    file = tmp_path / files[1]
    data = bytearray(file.read_bytes())
    data[-13] ^= 1
    file.write_bytes(data)
    store, faults = FeatureStore(tmp_path), {}
    for i in range(len(store)):
        try:
            store[i]
        except UserError as error:
            faults[i] = str(error)
    ((bad, said),) = faults.items()
    assert f"{files[1]}: row {bad}: its bytes are not those that were written" in said
    (fault,) = remove_damaged(tmp_path)
    assert f"{files[1]}: sample " in fault
    with pytest.raises(UserError, match="is missing"):
        FeatureStore(tmp_path)
    with StoreWriter(tmp_path, META, HEAD) as writer:
        assert bad in [i for i, sample in enumerate(SAMPLES) if _key(sample) not in writer]
        writer.add(SAMPLES, MASS)
        writer.finish([_key(sample) for sample in SAMPLES])
    store = FeatureStore(tmp_path)
    assert all(store[i].aux.equal(SAMPLES[i].aux) for i in range(4))
    assert remove_damaged(tmp_path) == []


def test_writers_share_a_folder(tmp_path: Path) -> None:
    """Each knows what was there when it opened the store, and writes files of its own."""
    first = StoreWriter(tmp_path, META, HEAD, writer=0)
    second = StoreWriter(tmp_path, META, HEAD, shard_bytes=1, writer=1)
    second.add(SAMPLES[:1], MASS)
    second.add(SAMPLES[1:2], MASS)
    first.add(SAMPLES[2:3], MASS)
    first.close_shard()
    with pytest.raises(UserError, match=r"capture has not finished \(3 samples so far\)"):
        FeatureStore(tmp_path)
    with pytest.raises(UserError, match="1 of 4 samples are in no shard"):
        first.finish([_key(sample) for sample in SAMPLES])
    third = StoreWriter(tmp_path, META, HEAD, writer=1)  # takes the place of one that was killed
    assert [_key(sample) in third for sample in SAMPLES] == [True, True, True, False]
    third.add(SAMPLES, MASS)
    third.close_shard()
    first.finish([_key(sample) for sample in SAMPLES])
    store = FeatureStore(tmp_path)
    assert all(store[i].aux.equal(SAMPLES[i].aux) for i in range(4))
    assert store.target_mass().equal(4 * MASS)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names[:2] == ["head.safetensors", "index.json"]
    assert names[2:] == [
        f"shard-{name}.safetensors" for name in ("0-00000", "1-00000", "1-00001", "1-00002")
    ]


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 2.0**60])
def test_eight_bits_keep_three_of_a_mantissa(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(50, A * T, generator=generator) * scale
    states[7, :T] = 0
    states[8, :T] = torch.tensor([1.999, -0.25, 2**-9, 0]) * scale
    values, exponent = fp8.encode(states, T)
    assert (values.dtype, exponent.dtype, exponent.shape) == (
        torch.float8_e4m3fn,
        torch.int8,
        (50, A),
    )
    decoded = fp8.decode(values, exponent)
    assert decoded.dtype == torch.bfloat16
    top = states.unflatten(-1, (A, T)).abs().amax(-1, keepdim=True).expand(-1, -1, T).flatten(1)
    # Half a step of three bits of mantissa; below the normal numbers half the smallest step.
    allowed = torch.maximum(states.abs() * 2**-4, top * 2**-17)
    assert ((decoded.double() - states.double()).abs() <= allowed).all()
    again = fp8.encode(decoded, T)
    assert again[0].view(torch.uint8).equal(values.view(torch.uint8))
    assert again[1].equal(exponent)


def test_states_in_eight_bits_come_back_as_they_were_handed_over(tmp_path: Path) -> None:
    meta = replace(META, dtype="float8_e4m3fn")
    samples = [replace(s, aux=fp8.rounded(s.aux, T), final=s.final.bfloat16()) for s in SAMPLES]
    with StoreWriter(tmp_path, meta, HEAD) as writer:
        writer.add(samples, MASS)
        writer.finish([_key(sample) for sample in samples])
    store = FeatureStore(tmp_path)
    for i, sample in enumerate(samples):
        for name in FIELDS:
            assert getattr(store[i], name).equal(getattr(sample, name))
    stored = load_file(tmp_path / "shard-0-00000.safetensors")
    assert (stored["aux"].dtype, stored["final"].dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    assert stored["aux_exponent"].shape == (24, A)


def test_tokens_alone(tmp_path: Path) -> None:
    _write(tmp_path, SAMPLES)
    ids, mask = FeatureStore(tmp_path).tokens(2)
    assert ids.equal(SAMPLES[2].input_ids)
    assert mask.equal(SAMPLES[2].loss_mask)
