"""How large a picture becomes, and how its pixels are cut into rows of tokens.

N samples, F frames, H x W pixels, V visual tokens in a grid of (time, rows, columns), C numbers in a token.
"""

import math

import numpy as np


def fit_grid(
    width_N: np.ndarray, height_N: np.ndarray, pixels: int, patch: int, upscale: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(rows_N, columns_N) of patches: the aspect ratio kept, at most `pixels` pixels, at least one patch.

    Pictures above the budget are brought down to it; smaller ones keep their size unless `upscale`. Sides are
    rounded to the nearest number of patches, a side below one patch is stretched to one. Where that exceeds
    the budget the longer side gives way, so an extreme ratio is squeezed until it fits.
    """
    most = max(pixels // (patch * patch), 1)
    scale_N = np.sqrt(pixels / (width_N.astype(np.float64) * height_N))
    if not upscale:
        scale_N = np.minimum(scale_N, 1.0)
    rows_N = np.maximum(np.rint(height_N * scale_N / patch), 1).astype(np.int64)
    columns_N = np.maximum(np.rint(width_N * scale_N / patch), 1).astype(np.int64)
    tall_N, over_N = height_N >= width_N, rows_N * columns_N > most
    # Only budgets of a patch or two let the shorter side, too, be rounded up beyond them.
    short_N = np.minimum(np.minimum(rows_N, columns_N), max(math.isqrt(most), 1))
    long_N = most // short_N
    rows_N = np.where(over_N, np.where(tall_N, long_N, short_N), rows_N)
    columns_N = np.where(over_N, np.where(tall_N, short_N, long_N), columns_N)
    return rows_N, columns_N


def fit_frames(seconds_N: np.ndarray, frames: int, fps: float, patch_time: int) -> np.ndarray:
    """Steps of time in a clip's grid: every 1/fps second within the clip, at most `frames` frames.

    Frames that fill no whole token are left out; a clip shorter than one token holds its last frame.
    """
    # A hundredth of a frame is the rounding of containers that count milliseconds.
    frames_N = np.clip(np.ceil(seconds_N * fps - 0.01), 1, frames).astype(np.int64)
    return np.maximum(frames_N // patch_time, 1)


def shrink_grid(grid: tuple[int, int, int], most: int) -> tuple[int, int, int]:
    """The grid with at most `most` tokens: first fewer pixels at the same ratio, then fewer steps of time."""
    steps, rows, columns = grid
    steps = min(steps, most)
    room = most // steps
    if rows * columns > room:
        side = np.array([columns]), np.array([rows])
        fitted_rows, fitted_columns = fit_grid(*side, pixels=room, patch=1, upscale=False)
        rows, columns = int(fitted_rows[0]), int(fitted_columns[0])
    return steps, rows, columns


def patchify(
    frames_FHW3: np.ndarray, patch: int, patch_time: int
) -> tuple[np.ndarray, np.ndarray, tuple[int, int, int]]:
    """uint8 frames -> (patch_VC, position_V3 int32, grid); a row is ordered (time, height, width, RGB).

    Sides must be multiples of `patch` and frames of `patch_time`, but for a single frame, which is repeated.
    """
    if len(frames_FHW3) == 1:
        frames_FHW3 = np.repeat(frames_FHW3, patch_time, axis=0)
    n_frames, height, width, _ = frames_FHW3.shape
    grid = n_frames // patch_time, height // patch, width // patch
    if (n_frames, height, width) != (grid[0] * patch_time, grid[1] * patch, grid[2] * patch) or 0 in grid:
        raise ValueError(
            f"{n_frames} frames of {width}x{height} pixels cannot be cut into tokens of {patch_time} frames "
            f"of {patch}x{patch}; each must be a multiple"
        )
    split = frames_FHW3.reshape(grid[0], patch_time, grid[1], patch, grid[2], patch, 3)
    patch_VC = split.transpose(0, 2, 4, 1, 3, 5, 6).reshape(math.prod(grid), -1)
    position_V3 = np.indices(grid, dtype=np.int32).reshape(3, -1).T
    return np.ascontiguousarray(patch_VC), np.ascontiguousarray(position_V3), grid


def unpatchify(patch_VC: np.ndarray, grid: tuple[int, int, int], patch: int, patch_time: int) -> np.ndarray:
    """The inverse of patchify: frames [F, H, W, 3] of any dtype (a picture has patch_time equal frames)."""
    steps, rows, columns = grid
    split = patch_VC.reshape(steps, rows, columns, patch_time, patch, patch, 3)
    return split.transpose(0, 3, 1, 4, 2, 5, 6).reshape(steps * patch_time, rows * patch, columns * patch, 3)
