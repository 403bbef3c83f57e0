"""Laws of the noise, the times and the sampler."""

import pytest
import torch
from scipy import stats

from models.config import FlowConfig
from models.flow import (
    counter_normal,
    counter_uniform,
    draw_times,
    euler,
    fold_seed,
    guide,
    interpolate,
    sampling_times,
    shift_mu,
    shift_times,
    target_velocity,
)

IDS = torch.arange(200).repeat_interleave(100)
ROWS = torch.arange(100).repeat(200)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])


def test_noise_is_standard_normal():
    noise = counter_normal(fold_seed(1, 7), IDS, ROWS, 12)
    assert noise.shape == (20_000, 12) and noise.dtype == torch.float32
    assert abs(noise.mean()) < 4 / noise.numel() ** 0.5
    assert abs(noise.var() - 1) < 4 * (2 / noise.numel()) ** 0.5
    assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > 1e-3
    for column in noise.T:
        assert stats.kstest(column.numpy(), "norm").pvalue > 1e-4
    assert abs(float((noise**4).mean()) - 3) < 0.1 and noise.abs().max() > 4.2


def test_neighbours_are_independent():
    noise = counter_normal(fold_seed(1, 7), IDS, ROWS, 12)
    by_id = noise.view(200, 100, 12)
    limit = 5 / noise.numel() ** 0.5
    for a, b in (
        (by_id[1:], by_id[:-1]),
        (by_id[:, 1:], by_id[:, :-1]),
        (noise[:, 1:], noise[:, :-1]),
        (noise[:, 1:].square(), noise[:, :-1].square()),
        (noise, counter_normal(fold_seed(1, 8), IDS, ROWS, 12)),
        (noise, counter_normal(fold_seed(2, 7), IDS, ROWS, 12)),
        (noise, counter_normal(fold_seed(1, 7), ROWS, IDS, 12)),
    ):
        assert abs(correlation(a, b)) < limit


def test_noise_belongs_to_its_token_alone():
    noise = counter_normal(3, IDS, ROWS, 5)
    pick = torch.randperm(len(IDS))[:50]
    assert torch.equal(counter_normal(3, IDS[pick], ROWS[pick], 5), noise[pick])
    assert torch.equal(counter_normal(3, IDS, ROWS, 4), noise[:, :4])
    assert counter_normal(3, IDS[:0], ROWS[:0], 5).shape == (0, 5)
    large = torch.tensor([2**62, -1, 2**40])
    assert len(counter_normal(3, large, torch.zeros(3, dtype=torch.int64), 1).unique()) == 3


def test_uniform_numbers_are_uniform_and_inside():
    ids = torch.arange(100_000)
    uniform = counter_uniform(5, ids)
    assert uniform.min() > 0 and uniform.max() < 1
    assert stats.kstest(uniform.numpy(), "uniform").pvalue > 1e-3
    assert abs(correlation(uniform, counter_uniform(5, ids, salt=1))) < 5 / 100_000**0.5
    assert abs(correlation(uniform[1:], uniform[:-1])) < 5 / 100_000**0.5


def test_seeds_fold_without_symmetry():
    seeds = {fold_seed(a, b) for a in range(-20, 20) for b in range(40)} | {fold_seed(3), fold_seed(3, 0, 0)}
    assert len(seeds) == 1602 and all(0 <= seed < 2**63 for seed in seeds)
    assert fold_seed(2**64 + 5, 1) == fold_seed(5, 1)


def test_times_are_logit_normal_then_shifted():
    ids, config = torch.arange(50_000), FlowConfig(mean=0.3, std=0.8)
    tokens = torch.full((50_000,), 1000)
    times = draw_times(9, ids, tokens, config)
    logits = torch.logit(times.double())
    assert stats.kstest(logits.numpy(), "norm", args=(0.3, 0.8)).pvalue > 1e-3
    shifted = draw_times(9, ids, tokens, FlowConfig(mean=0.3, std=0.8, shift_low=0.5, shift_high=1.15))
    mu = 0.5 + 0.65 * (1000 - 256) / (4096 - 256)
    torch.testing.assert_close(torch.logit(shifted.double()), logits + mu, rtol=1e-3, atol=1e-3)


def test_shift_is_flux_formula_and_keeps_the_ends():
    config = FlowConfig(shift_low=0.5, shift_high=1.15)
    mu = shift_mu(torch.tensor([256, 4096, 100_000]), config)
    torch.testing.assert_close(mu, torch.tensor([0.5, 1.15, 1.15]))
    time = torch.linspace(0.05, 1, 20)
    torch.testing.assert_close(shift_times(time, mu[1]), mu[1].exp() / (mu[1].exp() + (1 / time - 1)))
    assert shift_times(torch.tensor([0.0, 1.0]), mu[1]).tolist() == [0.0, 1.0]
    assert torch.equal(shift_times(time, torch.zeros(())), time)


def test_the_straight_path_leads_from_noise_to_data():
    data, noise = torch.randn(6, 4), torch.randn(6, 4)
    time_V = torch.tensor([0.0, 1.0, 0.5, 0.2, 0.9, 0.7])
    mixed = interpolate(data, noise, time_V)
    torch.testing.assert_close(mixed, (1 - time_V)[:, None] * data + time_V[:, None] * noise)
    torch.testing.assert_close(mixed - time_V[:, None] * target_velocity(data, noise), data)


def test_euler_integrates_each_sequence_at_its_own_times():
    data, noise = torch.randn(6, 4), torch.randn(6, 4)
    sequence_V = torch.tensor([0, 0, 1, 1, 1, 2])
    tokens_S = torch.tensor([2, 3000, 100_000])
    time_NS = sampling_times(7, tokens_S, FlowConfig(shift_low=0.5, shift_high=1.15))
    assert time_NS.shape == (8, 3) and (time_NS.diff(dim=0) < 0).all()
    seen = []

    def velocity(x_VC, time_S):
        seen.append(time_S)
        torch.testing.assert_close(x_VC, interpolate(data, noise, time_S[sequence_V]), rtol=1e-4, atol=1e-4)
        return target_velocity(data, noise)

    torch.testing.assert_close(euler(velocity, noise, time_NS, sequence_V), data, rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.stack(seen), time_NS[:-1])


def test_guidance_extrapolates_from_the_unconditional():
    conditional, unconditional = torch.tensor([[3.0]]), torch.tensor([[1.0]])
    assert [guide(conditional, unconditional, scale).item() for scale in (0, 1, 2.5)] == [1, 3, 6]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_noise_on_a_gpu_is_the_noise_on_a_cpu():
    expected = counter_normal(3, IDS, ROWS, 12)
    torch.testing.assert_close(
        counter_normal(3, IDS.cuda(), ROWS.cuda(), 12).cpu(), expected, rtol=1e-4, atol=1e-5
    )
