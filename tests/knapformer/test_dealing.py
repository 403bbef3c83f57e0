"""Dealing sequences to blocks: each gets its share of load and attention, and keeps what it can."""

import numpy as np
import pytest

from data.codes import synthetic_lengths
from knapformer.planners.candidates import least_degrees
from knapformer.planners.dealing import deal
from knapformer.planners.job import Job
from tests.knapformer.batches import COST


def job_of(lens: np.ndarray, homes: np.ndarray, ranks: int) -> tuple[Job, np.ndarray]:
    job = Job.of(lens, homes, ranks=ranks, heads=24, cost=COST, domain=8, cap=None)
    return job, least_degrees(job, job.goal, 8 * job.goal).choice_S


@pytest.mark.parametrize("preset", ["mixres", "joint"])
@pytest.mark.parametrize("ranks", [32, 64])
def test_every_block_gets_its_share_of_load_and_of_attention(preset, ranks):
    for seed in range(10):
        parts = [synthetic_lengths(f"paper_{preset}", seed * 2 + i) for i in range(ranks // 32)]
        lens = np.concatenate([lens for lens, _ in parts])
        homes = np.concatenate([homes + 32 * i for i, (_, homes) in enumerate(parts)])
        job, choice_S = job_of(lens, homes, ranks)
        block_S = deal(job, choice_S)
        load_B, heads_B = (np.bincount(block_S, x_S) for x_S in (job.whole_S, job.heads_S))
        assert load_B.max() <= 8 * job.goal
        assert heads_B.max() <= heads_B.mean() * 1.15


def test_what_is_even_over_blocks_stays_in_them():
    lens, homes = np.tile([40_000, *[400] * 30], 4), np.repeat(np.arange(4) * 8, 31)
    job, choice_S = job_of(lens, homes, 32)
    assert choice_S.any() and (deal(job, choice_S) == homes // 8).all()


def test_long_sequences_of_one_block_are_shared_out():
    lens, homes = np.array([60_000] * 4 + [500] * 64), np.array([0] * 4 + [8] * 64)
    job, choice_S = job_of(lens, homes, 32)
    assert sorted(deal(job, choice_S)[:4]) == [0, 1, 2, 3]
