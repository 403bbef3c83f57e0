"""From the samples a rank read to the tokens it computes on: pack at home, route, unpack where they landed.

S sequences of the global batch, C chunks of a plan, V visual and W text tokens, U caption bytes.
A sequence's tokens are its caption's bytes, then its visual tokens in (t, h, w) order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from data.samples import Sample
from knapformer import RoutingPlan, route_rows
from knapformer_cli.training.parallel import World
from models.config import FlowConfig
from models.flow import counter_normal, counter_uniform, draw_times, fold_seed, interpolate, target_velocity
from models.tokens import Attend, Tokens

# Independent draws from one (seed, sample) are told apart by these.
TIME, NOISE, DROPOUT = 1, 2, 3


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """What every rank knows of all S sequences of the global batch: numpy, gathered once."""

    id_S: np.ndarray
    text_S: np.ndarray
    visual_S: np.ndarray
    home_S: np.ndarray
    source_S: np.ndarray  # index into the names given to `describe`

    @property
    def len_S(self) -> np.ndarray:
        return self.text_S + self.visual_S

    @classmethod
    def of(cls, table_SM: np.ndarray, home_S: np.ndarray) -> "GlobalBatch":
        return cls(table_SM[:, 0], table_SM[:, 1], table_SM[:, 2], home_S, table_SM[:, 3])


@dataclass(frozen=True, eq=False)
class Arrived:
    """The tokens of one micro-step that landed on this rank, S chunks of sequences, before any noise."""

    patch_VC: Tensor  # as the loader made them
    caption_U: Tensor  # whole captions, one after the other
    position_T3: Tensor
    caption_S: (
        Tensor  # caption bytes of the chunk's sequence; on the CPU, where the encoder wants its maximum
    )
    id_S: Tensor  # sample of the chunk
    visual_S: Tensor  # visual tokens of the chunk's whole sequence
    text_W: Tensor  # row of caption_U of each text token
    place_W: Tensor  # place of each text token among the T
    place_V: Tensor  # place of each visual token among the T
    sequence_T: Tensor  # chunk of each token
    sequence_V: Tensor  # chunk of each visual token
    row_V: Tensor  # number of each visual token within its sample

    def tokens(self, latent_VC: Tensor, time_S: Tensor) -> Tokens:
        return Tokens(
            latent_VC=latent_VC,
            time_S=time_S,
            caption_U=self.caption_U,
            caption_len_S=self.caption_S,
            text_W=self.text_W,
            place_W=self.place_W,
            place_V=self.place_V,
            sequence_T=self.sequence_T,
            position_T3=self.position_T3,
        )


def describe(samples: Sequence[Sample], sources: Sequence[str]) -> np.ndarray:
    """[S_local, 4] id, caption bytes, visual tokens and number of the source of each sample."""
    rows = [(s.id, len(s.text_W), len(s.patch_VC), sources.index(s.source)) for s in samples]
    return np.array(rows, np.int64).reshape(-1, 4)


def drop_captions(samples: Sequence[Sample], share: float, seed: int) -> list[Sample]:
    """Empty the captions of about `share` of the samples; which ones is a function of (seed, sample id)."""
    dropped = dropped_captions([s.id for s in samples], share, seed)
    return [replace(s, text_W=s.text_W[:0]) if drop else s for s, drop in zip(samples, dropped, strict=True)]


def dropped_captions(ids: Sequence[int], share: float, seed: int) -> list[bool]:
    """Whether the caption of each sample is emptied."""
    if not ids or not share:
        return [False] * len(ids)
    return (counter_uniform(fold_seed(seed, DROPOUT), torch.tensor(ids)) < share).tolist()


def route_batch(
    samples: Sequence[Sample], batch: GlobalBatch, plan: RoutingPlan, world: World, channels: int
) -> Arrived:
    """Send the raw inputs of the plan's sequences to their hosts: one all-to-all, in the loader's own dtypes.

    `samples` are this rank's of the global batch, in order; `channels` is the width of a patch row.
    """
    visual_C = plan.overlap_C(batch.text_S, batch.len_S)
    caption_C = batch.text_S[
        plan.seq_C
    ]  # a caption travels whole to each host of its sequence: it is read whole
    mine = np.flatnonzero(plan.home_C == world.rank)
    # Sequences are numbered by home, so ours are neighbours.
    local_C = plan.seq_C[mine] - int(np.searchsorted(batch.home_S, world.rank))
    whole = [samples[i] for i in local_C[plan.first_C()[mine]]]
    parts = [
        (_rows([s.patch_VC for s in whole], (channels,), np.uint8), visual_C),
        (_rows([s.position_V3 for s in whole], (3,), np.int32), visual_C),
        (_rows([samples[i].text_W for i in local_C], (), np.uint8), caption_C),
    ]
    arrived = route_rows([(rows.to(world.device), rows_C) for rows, rows_C in parts], plan, world.group)
    return unpack(batch, plan, world.rank, *arrived)


def unpack(
    batch: GlobalBatch, plan: RoutingPlan, rank: int, patch_VC: Tensor, position_V3: Tensor, caption_U: Tensor
) -> Arrived:
    """Index what landed on `rank`: which sequence a row belongs to, and its place among the T tokens."""
    here = np.flatnonzero(plan.host_C == rank)
    seq_S, len_S, offset_S = plan.seq_C[here], plan.len_C[here], plan.offset_C()[here]
    caption_S = batch.text_S[seq_S]
    text_S = np.clip(caption_S - offset_S, 0, len_S)  # of the chunk: what it holds of the caption comes first
    start_S = np.cumsum(len_S) - len_S
    caption_start_S = np.cumsum(caption_S) - caption_S
    chunk_S = np.arange(len(here))
    columns = {
        "id_S": batch.id_S[seq_S],
        "visual_S": batch.visual_S[seq_S],
        "text_W": ranges(caption_start_S + offset_S, text_S),
        "place_W": ranges(start_S, text_S),
        "place_V": ranges(start_S + text_S, len_S - text_S),
        "sequence_T": np.repeat(chunk_S, len_S),
        "sequence_V": np.repeat(chunk_S, len_S - text_S),
        "row_V": ranges(np.maximum(offset_S - caption_S, 0), len_S - text_S),
    }
    index = {
        name: torch.from_numpy(rows).to(patch_VC.device, non_blocking=True) for name, rows in columns.items()
    }
    position_T3 = position_V3.new_zeros(int(len_S.sum()), 3).index_copy_(0, index["place_V"], position_V3)
    return Arrived(
        patch_VC=patch_VC,
        caption_U=caption_U,
        position_T3=position_T3,
        caption_S=torch.from_numpy(caption_S),
        **index,
    )


def ranges(start_N: np.ndarray, count_N: np.ndarray) -> np.ndarray:
    """start, start+1, ... (count of them) for each of N, one after the other."""
    before_N = np.cumsum(count_N) - count_N
    return np.repeat(start_N - before_N, count_N) + np.arange(count_N.sum())


def _rows(arrays: Sequence[np.ndarray], shape: tuple[int, ...], dtype: type) -> Tensor:
    empty: np.ndarray = np.zeros((0, *shape), dtype)  # a rank without samples still takes part
    return torch.from_numpy(np.concatenate([empty, *arrays]))


def flow_loss(
    denoiser: Callable[[Tokens, Attend], Tensor],
    arrived: Arrived,
    attend: Attend,
    flow: FlowConfig,
    clean_VC: Tensor,
    seed: int,
    step: int,
) -> Tensor:
    """Sum over this rank's visual tokens of the rectified-flow error, mean over channels.

    Noise and time depend on (seed, step, sample, token, channel) alone, so on no rank and no layout.
    """
    id_V = arrived.id_S[arrived.sequence_V]
    noise_VC = counter_normal(fold_seed(seed, step, NOISE), id_V, arrived.row_V, clean_VC.shape[1])
    time_S = draw_times(fold_seed(seed, step, TIME), arrived.id_S, arrived.visual_S, flow)
    latent_VC = interpolate(clean_VC, noise_VC, time_S[arrived.sequence_V])
    velocity_VC = denoiser(arrived.tokens(latent_VC, time_S), attend)
    return (velocity_VC - target_velocity(clean_VC, noise_VC)).square().mean(1).sum()
