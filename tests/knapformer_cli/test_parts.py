"""Parts of training that are plain functions."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.samples import Sample
from knapformer import RoutingPlan
from knapformer_cli.schema import SchedulerConfig
from knapformer_cli.training.batch import GlobalBatch, describe, drop_captions, ranges, unpack
from knapformer_cli.training.gallery import save_clips, save_pictures
from knapformer_cli.training.optimizer import Average, learning_rate


def sample(number: int, text: int, visual: int) -> Sample:
    rows = np.zeros((visual, 12), np.uint8)
    positions = np.zeros((visual, 3), np.int32)
    return Sample(number, "", "", np.full(text, 65, np.uint8), rows, positions, (1, 1, visual))


def test_warm_up_is_linear_and_decay_ends_at_its_final_share() -> None:
    for decay in ("cosine", "linear"):
        config = SchedulerConfig(warmup=10, decay=decay, final=0.1)
        rates = [learning_rate(step, 100, 2.0, config) for step in range(100)]
        assert rates[:10] == pytest.approx([2.0 * (n + 1) / 10 for n in range(10)])
        assert all(a >= b for a, b in pairwise(rates[10:]))
        assert rates[-1] == pytest.approx(0.2)
    assert learning_rate(99, 100, 2.0, SchedulerConfig(warmup=0, decay="constant")) == 2.0


def test_which_captions_are_dropped_depends_on_the_sample_alone() -> None:
    samples = [sample(number, 3, 1) for number in range(2000)]
    kept = {s.id for s in drop_captions(samples, 0.25, seed=4) if len(s.text_W)}
    assert 1400 < len(kept) < 1600
    again = {s.id for s in drop_captions(samples[::-3], 0.25, seed=4) if len(s.text_W)}
    assert again == kept & {s.id for s in samples[::-3]}
    assert kept != {s.id for s in drop_captions(samples, 0.25, seed=5) if len(s.text_W)}


def test_ranges_are_runs_one_after_the_other() -> None:
    assert ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]


def test_a_split_sequence_lies_as_its_tokens_do_wherever_the_cut_falls() -> None:
    batch = GlobalBatch.of(describe([sample(7, 3, 5), sample(8, 0, 1)], [""]), np.array([0, 0]))
    for cut in range(1, 8):  # inside the caption, at its end, inside the picture
        plan = RoutingPlan(2, *(np.array(x) for x in ([0, 0, 1], [cut, 8 - cut, 1], [0, 0, 0], [0, 1, 1])))
        seen = []
        for rank, sequences in ((0, 1), (1, 2)):
            text = min(cut, 3) if rank == 0 else 3 - min(cut, 3)
            visual = cut - text if rank == 0 else 8 - cut - text + 1
            patch_VC = torch.zeros(visual, 12, dtype=torch.uint8)
            here = unpack(batch, plan, rank, patch_VC, torch.ones(visual, 3), torch.zeros(3))
            assert len(here.id_S) == sequences
            assert sorted([*here.place_W.tolist(), *here.place_V.tolist()]) == list(range(text + visual))
            chunk = here.sequence_T == 0
            seen += [f"t{row}" for row in here.text_W[: chunk.sum()].tolist()]
            seen += [f"v{row}" for row in here.row_V[here.sequence_V == 0].tolist()]
        assert seen == ["t0", "t1", "t2", "v0", "v1", "v2", "v3", "v4"]


def test_the_average_swaps_in_and_out_again() -> None:
    model = torch.nn.Linear(2, 2)
    average = Average(model, decay=0.5)
    with torch.no_grad():
        model.weight.add_(1.0)
    own = model.weight.clone()
    average.update(step=100)
    with average.applied():
        torch.testing.assert_close(model.weight, own - 0.5)
    torch.testing.assert_close(model.weight, own)
    assert math.isfinite(average.weights["bias"].sum())


def test_drawings_become_files_that_open(tmp_path: Path) -> None:
    frame_F = 20 * np.arange(3, dtype=np.uint8)[:, None, None, None]
    clips = [np.full((3, 8, 8, 3), 40 * n, np.uint8) + frame_F for n in range(4)]
    prompts = ["a caption of several words", "another"]
    (png,) = save_pictures(tmp_path / "new" / "p.png", prompts, clips)
    gif, strip = save_clips(tmp_path / "c.gif", prompts, clips, fps=4)
    with Image.open(gif) as moving:
        assert (moving.n_frames, moving.info["duration"]) == (3, 250)
        assert moving.size == Image.open(png).size
    assert Image.open(strip).width > Image.open(png).width
