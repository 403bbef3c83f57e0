"""The order of global batches is a function of data, seed and settings, and of nothing else."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import DataConfig, DataError, SourceConfig
from data.loader import Loader
from data.manifest import open_manifest
from data.order import Order, epoch_order, raw
from tests.data.media import config, pairs, picture, tar

TOKENS = 16 + 5  # of a sample of pairs(): 64 pixels in patches of 2, and a caption of five bytes


def shards(folder: Path, *sizes: int) -> list[str]:
    return [str(tar(folder / f"{n}.tar", pairs(size, "abcdefgh"[n]))) for n, size in enumerate(sizes)]


def draws(
    given: DataConfig, tokens: int, count: int, seed: int = 0, state: dict[str, Any] | None = None
) -> list:
    """[(keys of a batch, state after it)]"""
    manifest = open_manifest(given)
    found = []
    for batch, after in islice(Order(given, manifest, tokens, seed, state), count):
        names = [
            (manifest.sources[d.source].name, manifest.sources[d.source].key_N[d.sample], d.number)
            for d in batch
        ]
        found.append((names, after))
    return found


def keys(batches: list) -> list[str]:
    return [key for names, _ in batches for _, key, _ in names]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=9),
    st.integers(1, 40),
    st.integers(0, 99),
    st.integers(0, 3),
)
def test_an_epoch_is_every_sample_once(sizes: list[int], streams: int, seed: int, epoch: int) -> None:
    shard_N = np.repeat(np.arange(len(sizes)), sizes)
    sample_E, stream_E = epoch_order(shard_N, streams, seed, "s", epoch)
    assert sorted(sample_E.tolist()) == list(range(sum(sizes)))
    assert stream_E.min() >= 0 and stream_E.max() < streams
    # Streams take turns: up to the end of the shortest, each of them comes once a round.
    busy = np.bincount(stream_E, minlength=streams)
    first = stream_E[: busy[busy > 0].min() * (busy > 0).sum()].reshape(-1, (busy > 0).sum())
    assert (np.sort(first, 1) == np.flatnonzero(busy)).all()


def test_a_shard_belongs_to_one_stream_if_there_are_enough(tmp_path: Path) -> None:
    shard_N = np.repeat(np.arange(6), 10)
    sample_E, stream_E = epoch_order(shard_N, 6, 0, "s", 0)
    assert len(set(zip(shard_N[sample_E].tolist(), stream_E.tolist(), strict=True))) == 6


def test_three_epochs_are_three_orders_each_complete(tmp_path: Path) -> None:
    batches = draws(config(shards(tmp_path, 10, 7, 3)), TOKENS * 4, 15)
    order = keys(batches)
    epochs = [order[start : start + 20] for start in (0, 20, 40)]
    assert all(len(set(epoch)) == 20 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert keys(draws(config(shards(tmp_path, 10, 7, 3)), TOKENS * 4, 15, seed=1)) != order


def test_a_batch_is_what_fits_and_the_next_one_begins_with_what_did_not(tmp_path: Path) -> None:
    given = config(shards(tmp_path, 20))
    assert [len(names) for names, _ in draws(given, TOKENS * 3 + TOKENS - 1, 4)] == [3, 3, 3, 3]
    numbers = [number for names, _ in draws(given, TOKENS * 3, 4) for _, _, number in names]
    assert numbers == list(range(12))


def test_sources_are_drawn_by_weight_and_weight_zero_never(tmp_path: Path) -> None:
    given = config(None)
    for name, size in (("a", 30), ("b", 5), ("c", 3)):
        (tmp_path / name).mkdir()
        given.sources[name] = SourceConfig(shards(tmp_path / name, size))
    del given.sources["s"]
    given.sources["a"].weight, given.sources["b"].weight, given.sources["c"].weight = 0.9, 0.1, 0.0
    for seed in range(5):
        names = [name for batch, _ in draws(given, TOKENS * 100, 100, seed) for name, _, _ in batch]
        assert len(names) == 10_000 and set(names) == {"a", "b"}
        assert (
            abs(names.count("b") - 1000) < 2 * np.sqrt(10_000 * 0.9 * 0.1) or seed
        )  # two sigmas, chosen seed
        assert abs(names.count("b") - 1000) < 4 * np.sqrt(10_000 * 0.9 * 0.1)


@pytest.mark.parametrize("exhausted", ["repeat", "drop", "stop"])
def test_a_source_that_runs_out_follows_the_policy(tmp_path: Path, exhausted: str) -> None:
    given = config(None)
    (tmp_path / "big").mkdir()
    (tmp_path / "small").mkdir()
    given.sources = {
        "big": SourceConfig(shards(tmp_path / "big", 40), 0.5, "drop"),
        "small": SourceConfig(shards(tmp_path / "small", 5), 0.5, exhausted),
    }
    order = [name for batch, _ in draws(given, TOKENS * 4, 40) for name, _, _ in batch]
    if exhausted == "repeat":
        assert len(order) == 160 and order.count("big") == 40
        assert order[-20:] == ["small"] * 20
    elif exhausted == "drop":
        assert (order.count("big"), order.count("small")) == (40, 5)
    else:
        assert order[-1] == "small" and order.count("small") == 5 and order.count("big") < 40


@pytest.mark.parametrize("after", range(1, 14))
def test_a_state_continues_the_order_wherever_it_was_taken(tmp_path: Path, after: int) -> None:
    """20 samples, 4 a batch: states 5 and 10 lie exactly at the end of an epoch."""
    given = config(shards(tmp_path, 10, 7, 3))
    whole = draws(given, TOKENS * 4, 18)
    state = json.loads(json.dumps(whole[after - 1][1]))
    rest = draws(given, TOKENS * 4, 18 - after, state=state)
    assert [names for names, _ in rest] == [names for names, _ in whole[after:]]
    assert [json.dumps(state) for _, state in rest] == [json.dumps(state) for _, state in whole[after:]]


def test_a_state_of_other_data_or_settings_is_refused_naming_the_difference(tmp_path: Path) -> None:
    paths = shards(tmp_path, 6, 6)
    given = config(paths)
    state = draws(given, TOKENS * 4, 2)[-1][1]
    for changed, tokens, words in (
        (config(paths, streams=4), TOKENS * 4, "streams=8, not 4"),
        (config(paths, picture_pixels=16), TOKENS * 4, "picture_pixels=64, not 16"),
        (given, TOKENS * 5, "batch_tokens=84, not 105"),
        (config(paths[:1]), TOKENS * 4, "1 shards removed, e.g. s/1"),
        (config([*paths, *shards(tmp_path, 6, 6, 2)[2:]]), TOKENS * 4, "1 shards added, e.g. s/2"),
    ):
        with pytest.raises(DataError, match=words):
            draws(changed, tokens, 1, state=state)
    with pytest.raises(DataError, match="seed=0, not 1"):
        draws(given, TOKENS * 4, 1, seed=1, state=state)
    with pytest.raises(DataError, match="version 0"):
        draws(given, TOKENS * 4, 1, state=state | {"version": 0})
    tar(
        tmp_path / "1.tar",
        [*pairs(5, "b"), ("b0005.png", picture(colour=(9, 9, 9))), ("b0005.txt", b"b0005")],
    )
    with pytest.raises(DataError, match=r"1 shards changed, e.g. s/1"):
        draws(given, TOKENS * 4, 1, state=state)


def test_the_order_does_not_depend_on_where_the_shards_lie(tmp_path: Path) -> None:
    for folder in ("p", "q"):
        (tmp_path / folder).mkdir()
    first = draws(config(shards(tmp_path / "p", 6, 6)), TOKENS * 4, 3)
    second = draws(config(shards(tmp_path / "q", 6, 6)), TOKENS * 4, 3, state=first[0][1])
    assert [names for names, _ in second[:2]] == [names for names, _ in first[1:]]


def test_a_sample_larger_than_a_batch_follows_the_policy(tmp_path: Path) -> None:
    path = str(tar(tmp_path / "a.tar", [*pairs(3), ("big.png", picture(64, 64)), ("big.txt", b"a big one")]))
    settings_of = {
        name: config(path, picture_pixels=4096, oversize=name) for name in ("refuse", "shrink", "alone")
    }
    manifest = open_manifest(settings_of["refuse"])
    with pytest.raises(DataError, match=r"s/a/big has 1033 tokens, more than the 200"):
        Loader(settings_of["refuse"], manifest, batch_tokens=200, rank=0, ranks=1, seed=0)
    for policy in ("shrink", "alone"):
        loader = Loader(settings_of[policy], manifest, batch_tokens=200, rank=0, ranks=1, seed=0)
        batches = list(islice(loader, 9))
        big = [batch for batch in batches if any(sample.key == "s/a/big" for sample in batch.samples)]
        assert big
        for batch in big:
            sample = next(sample for sample in batch.samples if sample.key == "s/a/big")
            if policy == "alone":
                assert len(batch.samples) == 1 and sample.tokens == 1033
            else:
                assert 150 < sample.tokens <= 200 and abs(sample.grid[1] - sample.grid[2]) < 2
    with pytest.raises(DataError, match="10 tokens, more than the 9"):
        Loader(settings_of["shrink"], manifest, batch_tokens=9, rank=0, ranks=1, seed=0)
    with pytest.raises(DataError, match="batch_tokens=0"):
        Loader(settings_of["alone"], manifest, batch_tokens=0, rank=0, ranks=1, seed=0)


def test_the_first_numbers_never_change() -> None:
    """A new numpy or an innocent edit must not reorder the data of runs that are to be resumed."""
    sample_E, stream_E = epoch_order(np.repeat(np.arange(3), (4, 3, 5)), 4, 7, "s", 1)
    assert sample_E.tolist() == [9, 1, 3, 11, 8, 4, 2, 10, 7, 0, 6, 5]
    assert stream_E.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 0, 1]
    assert raw(7, 2, "sources", 0).tolist() == [10465186425138475122, 10860900338592748331]
