"""Ranks and workers change who decodes a sample, and nothing else."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
import zlib
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.config import DataConfig, DataError
from data.loader import Loader, LocalBatch, start_worker, worker_context
from data.manifest import open_manifest
from data.samples import Sample
from data.video import read_clip
from tests.data.media import clip, config, encoded, pairs, tar
from tests.data.test_order import TOKENS, shards
from tests.waiting import wait_for


def run(
    given: DataConfig, tokens: int, count: int, rank: int = 0, ranks: int = 1, state: Any = None
) -> list[LocalBatch]:
    loader = Loader(
        given, open_manifest(given), batch_tokens=tokens, rank=rank, ranks=ranks, seed=0, state=state
    )
    return list(islice(loader, count))


def print_of(sample: Sample) -> tuple[Any, ...]:
    arrays = (sample.text_W, sample.patch_VC, sample.position_V3)
    return sample.id, sample.key, sample.grid, [zlib.crc32(np.ascontiguousarray(array)) for array in arrays]


def union(
    given: DataConfig, tokens: int, count: int, ranks: int, state: Any = None
) -> list[list[tuple[Any, ...]]]:
    """The global batches, put together from all ranks, in the order of their draws."""
    parts = [run(given, tokens, count, rank, ranks, state) for rank in range(ranks)]
    assert {len(part) for part in parts} == {count}
    batches = []
    for together in zip(*parts, strict=True):
        assert len({batch.number for batch in together}) == 1
        assert len({json.dumps(batch.state) for batch in together}) == 1
        batches.append(sorted(print_of(sample) for batch in together for sample in batch.samples))
    return batches


@pytest.fixture
def mixed(tmp_path: Path) -> DataConfig:
    """Shards of 10, 7 and 3 pictures, and one of four clips."""
    clips = []
    for number in range(4):
        content = clip(tmp_path / "clip.mp4", 8, size=(32 + 8 * number, 32))
        clips += [(f"m{number}.mp4", content), (f"m{number}.txt", b"move")]
    return config([*shards(tmp_path, 10, 7, 3), str(tar(tmp_path / "clips.tar", clips))])


def test_all_ranks_together_draw_exactly_the_global_batches(mixed: DataConfig) -> None:
    whole = union(mixed, 600, 12, ranks=1)
    for ranks in (2, 3, 4, 8):
        assert union(mixed, 600, 12, ranks) == whole
    epoch = [key for batch in whole for _, key, _, _ in batch][:24]
    assert len(set(epoch)) == 24


def test_a_run_resumes_on_other_ranks_byte_for_byte(mixed: DataConfig) -> None:
    whole = union(mixed, 600, 10, ranks=1)
    state = json.loads(json.dumps(run(mixed, 600, 4, rank=1, ranks=2)[-1].state))
    for ranks in (1, 3, 4):
        assert union(mixed, 600, 6, ranks, state) == whole[4:]


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing_even_after_the_parent_decoded_video(
    mixed: DataConfig, tmp_path: Path, workers: int
) -> None:
    read_clip(clip(tmp_path / "parent.mp4", 8), 8, 8.0, (8, 8), 1.0, (0, 0, 0))
    whole = union(mixed, 600, 9, ranks=1)
    mixed.workers = workers
    generator = torch.get_rng_state()
    batches = run(mixed, 600, 5)
    assert torch.equal(torch.get_rng_state(), generator) and not multiprocessing.active_children()
    assert [sorted(map(print_of, batch.samples)) for batch in batches] == whole[:5]
    # The loop was left while batches were prefetched; none of them counts.
    mixed.workers = 0
    assert union(mixed, 600, 4, 1, batches[-1].state) == whole[5:]


def test_one_shard_is_enough_for_many_ranks(tmp_path: Path) -> None:
    given = config(shards(tmp_path, 40), streams=32)
    parts = [run(given, TOKENS * 20, 2, rank, 32) for rank in range(32)]
    ids = sorted(sample.id for part in parts for batch in part for sample in batch.samples)
    assert ids == list(range(40))
    with pytest.raises(DataError, match=r"data.streams=32 must be at least the number of ranks, 33"):
        run(given, TOKENS * 20, 1, 32, 33)
    with pytest.raises(DataError, match="rank 4"):
        run(given, TOKENS * 20, 1, 4, 4)


def test_a_sample_is_its_picture_and_its_caption(tmp_path: Path) -> None:
    from PIL import Image

    from data.geometry import unpatchify

    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    members = [("k.png", encoded(Image.fromarray(pixels))), ("k.txt", "caf\u00e9 au lait".encode())]
    given = config(str(tar(tmp_path / "a.tar", members)), max_text=4)
    sample = run(given, 100, 1)[0].samples[0]
    assert (sample.id, sample.key, sample.source, sample.grid) == (0, "s/a/k", "s", (1, 3, 4))
    assert sample.text_W.dtype == np.uint8 and bytes(sample.text_W) == b"caf"  # half an e-acute is none
    assert sample.position_V3.tolist()[:5] == [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 3], [0, 1, 0]]
    assert (unpatchify(sample.patch_VC, sample.grid, 2, 1)[0] == pixels).all()
    assert sample.patch_VC.shape == (12, given.channels) and sample.tokens == 15


def broken_shard(tmp_path: Path, good: int, broken: int) -> str:
    """Pictures whose header is sound and whose pixels are missing: only decoding can tell."""
    cut = []
    for name, content in pairs(broken, "z"):
        cut.append((name, content[:-30] if name.endswith(".png") else content))
    return str(tar(tmp_path / "a.tar", [*pairs(good), *cut]))


def test_what_cannot_be_decoded_is_skipped_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = config(broken_shard(tmp_path, 6, 2))
    batches = run(given, TOKENS * 4, 2)
    assert sum(len(batch.samples) for batch in batches) == 6
    reports = [report for batch in batches for report in batch.reports]
    assert len(reports) == 2 and all(
        "s/a: z000" in report and "cannot be decoded" in report for report in reports
    )
    assert all(report in caplog.text for report in reports)
    ids = {sample.id for batch in batches for sample in batch.samples}
    assert len(ids) == 6 and ids < set(range(8))


def test_the_budget_of_failures_ends_the_run_in_words(tmp_path: Path) -> None:
    given = config(broken_shard(tmp_path, 6, 4), max_failures=5)
    with pytest.raises(DataError, match=r"6 samples could not be decoded, more than data.max_failures=5"):
        run(given, TOKENS * 4, 20)
    given = config(broken_shard(tmp_path, 1, 120))
    with pytest.raises(DataError, match="100 samples in a row could not be decoded"):
        run(given, TOKENS * 200, 20)


def test_a_shard_that_changes_during_the_run_is_reported(tmp_path: Path) -> None:
    path = Path(shards(tmp_path, 4)[0])
    given = config(str(path))
    loader = Loader(given, open_manifest(given), batch_tokens=TOKENS * 4, rank=0, ranks=1, seed=0)
    content = bytearray(path.read_bytes())
    content[530] ^= 1  # in the first picture
    path.write_bytes(content)
    batch = next(iter(loader))
    assert len(batch.samples) == 3 and "changed since it was indexed" in batch.reports[0]


def test_a_finite_run_ends_for_all_ranks_after_the_same_batches(tmp_path: Path) -> None:
    given = config(shards(tmp_path, 10, 7, 3))
    given.sources["s"].exhausted = "stop"
    parts = [run(given, TOKENS * 3, 99, rank, 2) for rank in range(2)]
    assert [len(part) for part in parts] == [7, 7]
    keys = [sample.key for part in parts for batch in part for sample in batch.samples]
    assert len(keys) == len(set(keys)) == 20


def test_a_rank_may_have_nothing_in_a_batch(tmp_path: Path) -> None:
    given = config(shards(tmp_path, 10))
    counts = [[len(batch.samples) for batch in run(given, TOKENS, 10, rank, 2)] for rank in range(2)]
    assert (np.sum(counts, 0) == 1).all() and all(0 in part for part in counts)


def begin_late(folder: Path) -> None:
    """A decoding process that begins when it is allowed to, and would then go on for a minute."""
    (folder / "here").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)
    start_worker(0)
    (folder / "began").touch()
    time.sleep(60)


def start_and_wait(folder: Path) -> None:
    worker = worker_context().Process(target=begin_late, args=(folder,))
    worker.start()
    print(worker.pid, flush=True)
    worker.join()


def lives(process: Path) -> bool:
    """Whether the process of this folder of /proc runs; a zombie has no command left."""
    try:
        return bool((process / "cmdline").read_bytes())
    except OSError:
        return False


@pytest.mark.parametrize("killed", [False, True])
def test_a_decoding_process_begins_only_under_a_living_trainer(tmp_path: Path, killed: bool) -> None:
    code = f"from tests.data.test_loader import *; start_and_wait(Path({str(tmp_path)!r}))"
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    worker = Path("/proc") / trainer.stdout.readline().strip()
    try:
        assert wait_for((tmp_path / "here").exists, 60)
        if killed:
            trainer.kill()
            trainer.wait()
        (tmp_path / "go").touch()
        if killed:
            assert wait_for(lambda: not lives(worker), 60)
        else:
            assert wait_for((tmp_path / "began").exists, 60)
    finally:
        trainer.kill()
        if lives(worker):
            os.kill(int(worker.name), 9)
