"""`knapformer sample`: a checkpoint's averaged weights, drawn from in one process."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from knapformer import choose_kernel
from knapformer_cli.config import load_config
from knapformer_cli.schema import Config
from knapformer_cli.training.checkpoint import check_complete, load_average
from knapformer_cli.training.gallery import save_clips, save_pictures
from knapformer_cli.training.sampling import Size, draw, whole_attention
from models.denoiser import Denoiser, build_denoiser
from models.tokens import Attend, Tokens

WIDTHS = (
    12  # numbers of the model's width that a token needs at once: queries, keys, values, the MLP's inside
)


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
    _check_prompts(prompts, config.data.max_text)
    _check_memory(count * len(prompts), (frames, height, width), config, device)
    wanted = [prompt for _ in range(count) for prompt in prompts]
    attend = whole_attention(choose_kernel("sdpa", device), device)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("drawing", total=s.steps)

        def step(tokens: Tokens, attend: Attend) -> Tensor:
            velocity_VC = model(tokens, attend)
            bar.advance(task)
            return velocity_VC

        drawn = draw(step, attend, wanted, range(len(wanted)), (frames, height, width), config, device)
    if frames == 1:
        written = save_pictures(out / "sample-pictures.png", prompts, drawn)
    else:
        written = save_clips(out / "sample-clips.gif", prompts, drawn, s.fps)
    for path in written:
        print(path)


def _size(text: str, patch: int) -> Sequence[int]:
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", text)
    sides = [int(side) for side in match.groups()] if match else []
    if not match or min(sides) < patch or any(side % patch for side in sides):
        raise ValueError(
            f"--size is {text!r}; write HEIGHTxWIDTH in pixels, each a multiple of the patch of {patch}"
        )
    return sides


def _check_prompts(prompts: Sequence[str], limit: int) -> None:
    for prompt in prompts:
        if (length := len(prompt.encode())) > limit:
            raise ValueError(
                f"--prompt {prompt[:30]!r}... has {length} bytes; this model reads at most {limit}"
            )


def _check_memory(count: int, size: Size, config: Config, device: torch.device) -> None:
    """Raise ValueError before the tokens of all drawings, with and without words, fill the memory."""
    c, m = config.data, config.model
    rows = -(-size[0] // c.patch_time) * (size[1] // c.patch) * (size[2] // c.patch)
    tokens = 2 * count * (rows + c.max_text)
    needed = tokens * m.width * 4 * WIDTHS
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > free:
        raise ValueError(
            f"{count} drawings of {size[0]}x{size[1]}x{size[2]} are {tokens} tokens and need about "
            f"{needed / 2**30:.0f} GiB, more than the {free / 2**30:.0f} that are free; "
            "lower --size, --frames or --count"
        )


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"--device is {name!r}; use auto or cpu, or cuda where there is a GPU")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
