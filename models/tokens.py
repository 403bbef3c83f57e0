"""What a denoiser is given: tokens as they lie on this rank.

T tokens, of them W text and V visual; S sequences; U caption bytes; C latent channels; H heads, K head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# (q_THK, k_THK, v_THK) -> out_THK over packed tokens; knows which tokens see each other. It must be
# differentiable in all three, on zero rows too, so that no parameter is left without a gradient.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Tokens:
    """T tokens of S (parts of) sequences as they lie on this rank: sequence by sequence, in each text first.

    A split sequence's caption comes whole to every rank that holds a part of it; text_W says which of its
    bytes are tokens here. caption_len_S may stay on the CPU: its maximum is read once a step.
    """

    latent_VC: Tensor  # noisy latents, float
    time_S: Tensor  # flow time in [0, 1], 1 is noise
    caption_U: Tensor  # integer bytes of the S captions, one after the other
    caption_len_S: Tensor  # int64
    text_W: Tensor  # int64 rows of caption_U whose tokens lie here
    place_W: Tensor  # int64 place of each text token among the T
    place_V: Tensor  # int64 place of each visual token among the T
    sequence_T: Tensor  # int64 row of time_S
    position_T3: Tensor  # int (t, h, w); text tokens at 0


def grid_positions(grid: tuple[int, int, int]) -> Tensor:
    """[t*h*w, 3] int64 positions of a latent grid in (t, h, w) order."""
    return torch.cartesian_prod(*(torch.arange(n) for n in grid)).view(-1, 3)


def pack_whole(
    latents: Sequence[Tensor],
    grids: Sequence[tuple[int, int, int]],
    captions: Sequence[bytes],
    time_S: Tensor,
    channels: int,
) -> tuple[Tokens, list[int]]:
    """Whole sequences on one process: their tokens, and how many each has (for `local_attend`)."""
    device = time_S.device
    text_len_S = torch.tensor([len(caption) for caption in captions], dtype=torch.int64)
    visual_len_S = torch.tensor([len(latent) for latent in latents], dtype=torch.int64)
    length_S = text_len_S + visual_len_S
    sequence_T = torch.arange(len(captions)).repeat_interleave(length_S)
    place_in_T = torch.arange(len(sequence_T)) - (length_S.cumsum(0) - length_S)[sequence_T]
    is_text_T = place_in_T < text_len_S[sequence_T]
    position_T3 = torch.zeros(len(sequence_T), 3, dtype=torch.int64)
    position_T3[~is_text_T] = torch.cat([grid_positions((0, 0, 0)), *map(grid_positions, grids)])
    tokens = Tokens(
        latent_VC=torch.cat([time_S.new_zeros(0, channels), *latents]),
        time_S=time_S,
        caption_U=torch.tensor(list(b"".join(captions)), dtype=torch.uint8, device=device),
        caption_len_S=text_len_S,
        text_W=torch.arange(int(text_len_S.sum()), device=device),
        place_W=is_text_T.nonzero()[:, 0].to(device),
        place_V=(~is_text_T).nonzero()[:, 0].to(device),
        sequence_T=sequence_T.to(device),
        position_T3=position_T3.to(device),
    )
    return tokens, length_S.tolist()
