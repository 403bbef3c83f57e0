"""Pictures and clips from a denoiser: guided Euler steps over packed prompts, dealt over the ranks."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from knapformer.kernels import Packing, VarlenKernel
from knapformer_cli.schema import Config
from knapformer_cli.training.parallel import World
from models.codec import PixelCodec
from models.flow import counter_normal, euler, guide, sampling_times
from models.text import caption_bytes
from models.tokens import Attend, Tokens, pack_whole

Denoise = Callable[[Tokens, Attend], Tensor]
AttendWhole = Callable[[list[int]], Attend]  # lengths of whole packed sequences -> their attention
Size = tuple[int, int, int]  # frames, height, width in pixels


def whole_attention(kernel: VarlenKernel, device: torch.device) -> AttendWhole:
    """Attention of sequences that are all here, by the kernel that training uses."""

    def of_lengths(lengths: list[int]) -> Attend:
        packing = Packing.of(lengths, device)
        return lambda q_THK, k_THK, v_THK: kernel(q_THK, k_THK, v_THK, packing)

    return of_lengths


@torch.no_grad()
def draw(
    denoiser: Denoise,
    attend_whole: AttendWhole,
    prompts: Sequence[str],
    numbers: Sequence[int],
    size: Size,
    config: Config,
    device: torch.device,
) -> list[np.ndarray]:
    """uint8 [F, H, W, 3] for each prompt, cut to whole patches of `size`.

    `numbers` choose the noise of each: the same number and seed draw the same picture, whoever else is drawn.
    The denoiser is called once an Euler step, also without prompts, so ranks may hold different shares.
    """
    c, s, count = config.data, config.sampling, len(prompts)
    codec = PixelCodec(c.patch, c.patch_time)
    grid = (-(-size[0] // c.patch_time), size[1] // c.patch, size[2] // c.patch)
    rows = grid[0] * grid[1] * grid[2]
    captions = [caption_bytes(prompt, c.max_text) for prompt in prompts] + [
        b""
    ] * count  # drawn without words, for guidance
    empty = torch.zeros(rows, codec.channels, device=device)
    time_S = torch.zeros(2 * count, device=device)
    tokens, lengths = pack_whole(
        [empty] * (2 * count), [grid] * (2 * count), captions, time_S, codec.channels
    )
    attend = attend_whole(lengths)

    sequence_V = torch.arange(count, device=device).repeat_interleave(rows)
    row_V = torch.arange(rows, device=device).repeat(count)
    id_V = torch.tensor(numbers, dtype=torch.int64, device=device)[sequence_V]
    noise_VC = counter_normal(config.training.seed, id_V, row_V, codec.channels)

    def velocity(latent_VC: Tensor, time_S: Tensor) -> Tensor:
        doubled = replace(tokens, latent_VC=latent_VC.repeat(2, 1), time_S=time_S.repeat(2))
        worded_VC, free_VC = denoiser(doubled, attend).chunk(2)
        return guide(worded_VC, free_VC, s.guidance)

    time_NS = sampling_times(s.steps, torch.full((count,), rows, device=device), config.training.flow)
    latents = euler(velocity, noise_VC, time_NS, sequence_V).view(count, rows, codec.channels)
    return [codec.decode(latent, grid)[: size[0]].cpu().numpy() for latent in latents]


def draw_shared(
    denoiser: Denoise,
    attend_whole: AttendWhole,
    prompts: Sequence[str],
    size: Size,
    config: Config,
    world: World,
) -> list[np.ndarray]:
    """On rank 0 `sampling.rows` drawings of each prompt, row by row; ranks share the work (collective)."""
    wanted = [prompt for _ in range(config.sampling.rows) for prompt in prompts]
    mine = range(world.rank, len(wanted), world.ranks)
    drawn = draw(denoiser, attend_whole, [wanted[i] for i in mine], list(mine), size, config, world.device)
    shares: list[list[np.ndarray]] = [[] for _ in range(world.ranks)]
    dist.gather_object(drawn, shares if world.rank == 0 else None, dst=0, group=world.cpu_group)
    return [shares[i % world.ranks][i // world.ranks] for i in range(len(wanted))] if world.rank == 0 else []
