"""`knapformer sample`: a checkpoint's averaged weights, drawn from in one process."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from knapformer import choose_kernel
from knapformer_cli.config import load_config
from knapformer_cli.schema import Config
from knapformer_cli.training.checkpoint import check_complete, load_average
from knapformer_cli.training.gallery import save_clips, save_pictures
from knapformer_cli.training.sampling import draw, whole_attention
from models.denoiser import Denoiser, build_denoiser


def load_denoiser(path: Path, device: torch.device) -> tuple[Config, Denoiser]:
    """Configuration and averaged model of a checkpoint, or of the newest one of a run folder.

    Raises ValueError where there is no complete checkpoint.
    """
    checkpoint = check_complete(path)
    config = load_config(checkpoint / "config.yaml")
    model = build_denoiser(config.model, config.data.channels)
    load_average(checkpoint, model)
    return config, model.to(device).eval()


def sample_command(
    checkpoint: Path,
    prompts: Sequence[str],
    out: Path,
    size: str,
    frames: int,
    count: int,
    seed: int,
    steps: int | None,
    guidance: float | None,
    device_name: str,
) -> None:
    """Draw `count` of each prompt and write them as a grid (and clips as GIF) into `out`."""
    for name, value in (("--frames", frames), ("--count", count), ("--steps", 1 if steps is None else steps)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed is {seed}; it must be at least 0 and below 2^63")
    if guidance is not None and not 0 <= guidance < 1e6:
        raise ValueError(f"--guidance is {guidance}; it must be at least 0")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {error.strerror}") from error
    device = _device(device_name)
    config, model = load_denoiser(checkpoint, device)
    s, default = config.sampling, config.sampling.pictures if frames == 1 else config.sampling.clips[1:]
    s.steps, s.guidance = steps or s.steps, s.guidance if guidance is None else guidance
    config.training.seed = seed
    height, width = _size(size, config.data.patch) if size else default
    wanted = [prompt for _ in range(count) for prompt in prompts]
    attend = whole_attention(choose_kernel("sdpa", device), device)
    drawn = draw(model, attend, wanted, range(len(wanted)), (frames, height, width), config, device)
    if frames == 1:
        written = save_pictures(out / "sample-pictures.png", prompts, drawn)
    else:
        written = save_clips(out / "sample-clips.gif", prompts, drawn, s.fps)
    for path in written:
        print(path)


def _size(text: str, patch: int) -> Sequence[int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match or min(int(match[1]), int(match[2])) < patch:
        raise ValueError(
            f"--size is {text!r}; write HEIGHTxWIDTH in pixels, each at least the patch of {patch}"
        )
    return int(match[1]), int(match[2])


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"--device is {name!r}; use auto or cpu, or cuda where there is a GPU")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
