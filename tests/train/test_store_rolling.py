"""A store below a limit: writer and reader wait for each other, and every sample arrives once."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from eagle3_core import UserError
from eagle3_core.target import Target
from eagle3_train.capture import Captured, Capturer, capture_rolling
from eagle3_train.cli import main
from eagle3_train.data import Example
from eagle3_train.store import RollingStore

COUNT, LENGTH = 24, 20
GENERATOR = torch.Generator().manual_seed(0)
EXAMPLES = [
    Example(f"file:{i}", torch.randint(256, (LENGTH,), generator=GENERATOR), torch.ones(LENGTH) > 0)
    for i in range(COUNT)
]
SAMPLE_BYTES = LENGTH * (4 * 32 * 4 + 8 + 1 + 4 + 4)  # three aux states and the final one in fp32
LIMIT = 10 * SAMPLE_BYTES + 8 * 10_000  # ten samples, and each shard has a header and target_mass


def _size(path: Path) -> int:
    """Of all shards; one may be deleted while they are counted."""
    total = 0
    for file in path.glob("shard-*"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def _produce(
    target: Target, path: Path
) -> tuple[threading.Thread, threading.Event, list[Captured]]:
    """Capture in a thread."""
    begun, done = threading.Event(), []
    capturer = Capturer(target, (1, 2, 4), torch.float32)

    def work() -> None:
        done.append(
            capture_rolling(
                capturer, EXAMPLES, path, batch_tokens=40, max_bytes=LIMIT, begun=begun.set,
                progress=False,
            )
        )  # fmt: skip

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert begun.wait(60)
    return thread, begun, done


def test_one_pass_through_less_disk_than_it_takes(
    make_target: Callable[..., Target], tmp_path: Path
) -> None:
    target = make_target()  # its own: a thread runs it
    # Before the thread starts: hooks in one model cannot tell two captures apart.
    capturer = Capturer(target, (1, 2, 4), torch.float32)
    expected = [capturer.run([example])[0][0] for example in EXAMPLES]
    thread, _, done = _produce(target, tmp_path)
    store = RollingStore(tmp_path, EXAMPLES, patience=60)
    assert store.lengths == [LENGTH] * COUNT
    for i in range(COUNT):
        sample = store[i]
        assert sample.input_ids.equal(EXAMPLES[i].input_ids)
        torch.testing.assert_close(sample.aux, expected[i].aux, rtol=1e-4, atol=1e-4)
        assert _size(tmp_path) <= LIMIT
        if i % 4 == 3:
            store.release(i - 3)  # a checkpoint behind, as fit does it
    thread.join(60)
    assert done[0].num_samples == COUNT
    with pytest.raises(UserError, match="sample 0 is consumed, the store holds one pass"):
        RollingStore(tmp_path, EXAMPLES)[0]
    assert RollingStore(tmp_path, EXAMPLES)[COUNT - 1].aux.equal(store[COUNT - 1].aux)
    with pytest.raises(UserError, match=r"plan\.json: is of other samples"):
        RollingStore(tmp_path, EXAMPLES[1:])


def test_a_reader_does_not_wait_for_ever(
    make_target: Callable[..., Target], tmp_path: Path
) -> None:
    """The limit holds ten samples, and nobody releases any."""
    thread, _, _ = _produce(make_target(), tmp_path)
    store = RollingStore(tmp_path, EXAMPLES, patience=0.5)
    assert store[0].input_ids.equal(EXAMPLES[0].input_ids)
    with pytest.raises(UserError, match=r"no new sample in 0 s; is eagle3-train capture running"):
        store[COUNT - 1]
    store.release(COUNT)
    thread.join(60)
    assert not thread.is_alive()
    assert list(tmp_path.glob("shard-*")) == []


@pytest.fixture
def rolling(tmp_path: Path, write_run: Callable[[Path], Path]) -> list[str]:
    return [
        *(str(write_run(tmp_path)), "capture.max_disk_gib=0.001", "fit.epochs=1"),
        *(
            "fit.save_every=1",
            "draft.init=random",
            "data.max_length=200",
            "eval.every=null",
            "capture.batch_tokens=40",
        ),
    ]


def test_fit_trains_on_what_capture_makes_beside_it(
    tmp_path: Path, rolling: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[int] = []
    producer = threading.Thread(target=lambda: done.append(main(["capture", *rolling])))
    producer.start()
    record = tmp_path / "out/features/train.inputs.json"
    for _ in range(600):
        if record.exists() or done:
            break
        time.sleep(0.1)
    assert main(["fit", *rolling, "--json"]) == 0
    producer.join(60)
    assert done == [0]
    assert (tmp_path / "out/draft/model.safetensors").exists()
    lines = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["samples"] for line in lines) == 16
    assert main(["fit", *rolling]) == 0
    assert "draft is complete" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("fit.epochs=2", "fit.epochs is 2 with capture.max_disk_gib, expected 1"),
        ("capture.mode=online", "capture.mode is online with capture.max_disk_gib"),
        ("draft.init=least_squares", "draft.init is least_squares with capture.max_disk_gib"),
        ("fit.save_every=null", "fit.save_every is missing with capture.max_disk_gib"),
        ("fit.save_every=9", "capture.max_disk_gib is 0.001, expected at least 0.0"),
    ],
)
def test_settings_that_need_a_sample_twice_are_refused(
    rolling: list[str], setting: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["capture", *rolling, setting]) == 2
    assert expected in capsys.readouterr().err
