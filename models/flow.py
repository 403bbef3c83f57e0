"""Rectified flow (Liu et al., arXiv 2209.03003; Esser et al., arXiv 2403.03206), as pure functions.

x_t = (1 - t) x + t noise; the model learns v = noise - x. All randomness is a hash of what it belongs to
(seed, sample, token, channel), so it is the same on any rank, in any layout.

S sequences, T tokens, V of them visual, C columns, N times.

"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from models.config import FlowConfig

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def _signed(word: int) -> int:
    """64 bits as the int64 that torch holds them in."""
    return word - (1 << 64) if word >> 63 else word


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical: torch's own shift of int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _scramble(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al. 2014); int64 arithmetic wraps."""
    for bits, factor in _MIX:
        x = (x ^ _shift_right(x, bits)) * _signed(factor)
    return x ^ _shift_right(x, 31)


def _absorb(state: Tensor, word: Tensor) -> Tensor:
    """A new state from a state and the next word of the key."""
    return _scramble(_scramble(state + _signed(_GOLDEN)) ^ word)


def fold_seed(*words: int) -> int:
    """One 63-bit seed from several numbers, such as a seed and a step."""
    state = torch.zeros((), dtype=torch.int64)
    for word in words:
        state = _absorb(state, torch.tensor(_signed(word & _MASK)))
    return int(state) & (_MASK >> 1)


def counter_uniform(seed: int, id_S: Tensor, salt: int = 0) -> Tensor:
    """[S] float32 in (0, 1), never an end of it, given by (seed, id, salt) alone."""
    bits_S = _absorb(
        _absorb(torch.full_like(id_S, seed, dtype=torch.int64), id_S.long()), torch.full_like(id_S, salt)
    )
    return (_shift_right(bits_S, 41).float() + 0.5) * 2.0**-23


def counter_normal(seed: int, id_T: Tensor, row_T: Tensor, columns: int) -> Tensor:
    """[T, columns] float32 normal numbers, each given by (seed, id, row, column) alone.

    Box-Muller on the two halves of one hash for each pair of columns.
    """
    key_T = _absorb(_absorb(torch.full_like(id_T, seed, dtype=torch.int64), id_T.long()), row_T.long())
    pair_P = torch.arange((columns + 1) // 2, device=id_T.device)
    bits_TP = _absorb(key_T[:, None], pair_P)
    radius_TP = (-2 * ((_shift_right(bits_TP, 32).float() + 0.5) * 2.0**-32).log()).sqrt()
    angle_TP = (bits_TP & 0xFFFFFFFF).float() * (2 * math.pi * 2.0**-32)
    normal_TC = torch.stack((radius_TP * angle_TP.cos(), radius_TP * angle_TP.sin()), 2).flatten(1)
    return normal_TC[:, :columns]


def draw_times(seed: int, id_S: Tensor, tokens_S: Tensor, config: FlowConfig) -> Tensor:
    """[S] float32 flow times of a training step: logit-normal, shifted by the number of visual tokens."""
    normal_S = torch.special.ndtri(counter_uniform(seed, id_S))
    return shift_times(torch.sigmoid(config.mean + config.std * normal_S), shift_mu(tokens_S, config))


def shift_mu(tokens_S: Tensor, config: FlowConfig) -> Tensor:
    """[S] FLUX's mu: from shift_low at 256 visual tokens linearly to shift_high at 4096, and held beyond.

    Going on linearly, a clip of 30,000 tokens would see nothing but noise.
    """
    share_S = (tokens_S.clamp(256, 4096).float() - 256) / (4096 - 256)
    return config.shift_low + (config.shift_high - config.shift_low) * share_S


def shift_times(time: Tensor, mu: Tensor) -> Tensor:
    """Times moved towards noise by e^mu, t' = e^mu t / (1 + (e^mu - 1) t); mu of zero changes nothing."""
    return mu.exp() * time / (1 + (mu.exp() - 1) * time)


def interpolate(latent_VC: Tensor, noise_VC: Tensor, time_V: Tensor) -> Tensor:
    """What the model sees at each token's own time."""
    return torch.lerp(latent_VC, noise_VC, time_V[:, None])


def target_velocity(latent_VC: Tensor, noise_VC: Tensor) -> Tensor:
    """What the model learns: the direction from data to noise."""
    return noise_VC - latent_VC


def guide(conditional_VC: Tensor, unconditional_VC: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance (Ho and Salimans, arXiv 2207.12598); scale 1 is the conditional velocity."""
    return torch.lerp(unconditional_VC, conditional_VC, scale)


def euler(
    velocity: Callable[[Tensor, Tensor], Tensor], noise_VC: Tensor, time_NS: Tensor, sequence_V: Tensor
) -> Tensor:
    """Integrate from noise to data: velocity(x_VC, time_S) at N-1 falling times, each sequence at its own."""
    x_VC = noise_VC
    for time_S, next_S in pairwise(time_NS):
        x_VC = x_VC + (next_S - time_S)[sequence_V, None] * velocity(x_VC, time_S)
    return x_VC


def sampling_times(steps: int, tokens_S: Tensor, config: FlowConfig) -> Tensor:
    """[steps + 1, S] times from 1 to 0, evenly spaced and then shifted like the training times."""
    time_N = torch.linspace(1, 0, steps + 1, device=tokens_S.device)
    return shift_times(time_N[:, None], shift_mu(tokens_S, config))
