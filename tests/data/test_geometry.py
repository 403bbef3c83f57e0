"""Sizes keep the ratio and the budget, never without a token; patchify loses nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.geometry import fit_frames, fit_grid, patchify, shrink_grid, unpatchify

SIDES = st.integers(1, 20_000)


def fit(width: int, height: int, pixels: int, patch: int, upscale: bool = False) -> tuple[int, int]:
    rows_N, columns_N = fit_grid(np.array([width]), np.array([height]), pixels, patch, upscale)
    return int(rows_N[0]), int(columns_N[0])


@given(SIDES, SIDES, st.integers(1, 1 << 20), st.integers(1, 32), st.booleans())
def test_a_grid_has_a_token_and_keeps_the_budget(
    w: int, h: int, pixels: int, patch: int, upscale: bool
) -> None:
    rows, columns = fit(w, h, pixels, patch, upscale)
    assert rows >= 1 and columns >= 1
    assert rows * columns <= max(pixels // patch**2, 1)


@given(SIDES, SIDES, st.integers(1, 1 << 20), st.integers(1, 32), st.booleans())
def test_turning_the_picture_turns_the_grid(w: int, h: int, pixels: int, patch: int, upscale: bool) -> None:
    rows, columns = fit(w, h, pixels, patch, upscale)
    assert fit(h, w, pixels, patch, upscale) == ((columns, rows) if w != h else (rows, columns))


@given(st.integers(64, 4096), st.integers(64, 4096))
def test_pictures_come_down_to_about_the_budget_with_their_ratio(w: int, h: int) -> None:
    rows, columns = fit(w, h, 256 * 256, 16, upscale=True)
    if max(w, h) <= 4 * min(w, h):
        assert 0.8 * 256 <= rows * columns <= 256
        assert 0.8 < (columns / rows) / (w / h) < 1.25


def test_each_extreme_has_its_rule() -> None:
    assert fit(1, 1, 256, 2) == (1, 1)
    assert fit(1, 3000, 256, 2) == (64, 1)
    assert fit(3000, 1, 256, 2) == (1, 64)
    assert fit(5, 5, 65536, 16) == (1, 1)
    assert fit(20, 20, 256, 2) == (8, 8)
    assert fit(14, 14, 256, 2) == (7, 7)
    assert fit(14, 14, 256, 2, upscale=True) == (8, 8)
    assert fit(10, 10, 1, 16) == (1, 1)


def test_frames_are_those_that_fall_within_the_clip() -> None:
    seconds_N = np.array([1.0, 0.999, 1.001, 0.05, 2.0, 100.0, 0.51])
    assert fit_frames(seconds_N, 16, 8.0, 1).tolist() == [8, 8, 8, 1, 16, 16, 5]
    assert fit_frames(seconds_N, 16, 8.0, 4).tolist() == [2, 2, 2, 1, 4, 4, 1]


@given(st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 40)), st.integers(1, 500))
def test_a_shrunken_grid_fits_and_is_not_empty(grid: tuple[int, int, int], most: int) -> None:
    steps, rows, columns = shrink_grid(grid, most)
    assert 1 <= steps * rows * columns <= most
    assert steps <= grid[0] and rows * columns <= grid[1] * grid[2]
    if np.prod(grid) <= most:
        assert (steps, rows, columns) == grid


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_unpatchify_is_the_inverse_of_patchify(t: int, h: int, w: int, patch: int, patch_time: int) -> None:
    shape = t * patch_time, h * patch, w * patch, 3
    frames_FHW3 = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    patch_VC, position_V3, grid = patchify(frames_FHW3, patch, patch_time)
    assert grid == (t, h, w) and patch_VC.shape == (t * h * w, patch_time * patch * patch * 3)
    assert (unpatchify(patch_VC, grid, patch, patch_time) == frames_FHW3).all() or len(frames_FHW3) == 1
    for row, (time, y, x) in zip(patch_VC, position_V3.tolist(), strict=True):
        block = frames_FHW3[time * patch_time :][:patch_time, y * patch :][:, :patch, x * patch :][
            :, :, :patch
        ]
        assert (row.reshape(patch_time, patch, patch, 3) == block).all()


def test_a_picture_repeats_its_frame_to_fill_a_token_of_time() -> None:
    frames_FHW3 = np.arange(48, dtype=np.uint8).reshape(1, 4, 4, 3)
    patch_VC, position_V3, grid = patchify(frames_FHW3, 2, 3)
    assert grid == (1, 2, 2) and position_V3.dtype == np.int32
    assert (unpatchify(patch_VC, grid, 2, 3) == frames_FHW3.repeat(3, 0)).all()


def test_frames_that_cannot_be_cut_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match="5x4 pixels"):
        patchify(np.zeros((1, 4, 5, 3), np.uint8), 2, 1)
