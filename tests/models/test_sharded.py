"""The models under FSDP2 on real processes: ranks without rows are ordinary ranks."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from models.denoiser import Denoiser, build_denoiser
from models.layers import local_attend
from tests.models.cases import CHANNELS, batch, randomise, small_config
from tests.spawn import spawn

CASES = [((1, 3, 2), b"seven"), ((2, 2, 2), b"")]


def shard(model: Denoiser, policy: MixedPrecisionPolicy) -> Denoiser:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in ("double_blocks", "single_blocks", "blocks"):
        for block in getattr(model.core, name, ()):
            fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def backward(model: Denoiser, cases: list, ranks: int) -> None:
    tokens, lengths = batch(cases)
    # FSDP averages over ranks: times the ranks is the sum.
    (ranks * model(tokens, local_attend(lengths)).square().sum()).backward()


def a_rank_without_rows_adds_nothing(group) -> None:
    for arch in ("mmdit", "dit"):
        whole = randomise(build_denoiser(small_config(arch=arch), CHANNELS))
        parts = randomise(build_denoiser(small_config(arch=arch), CHANNELS))
        shard(parts, MixedPrecisionPolicy())
        backward(whole, CASES, 1)
        backward(parts, CASES if dist.get_rank() == 1 else [], dist.get_world_size())
        for (name, expected), sharded in zip(whole.named_parameters(), parts.parameters(), strict=True):
            torch.testing.assert_close(
                sharded.grad.full_tensor(),
                expected.grad,
                rtol=1e-5,
                atol=1e-5,
                msg=lambda m, n=name: f"{n}: {m}",
            )


def bfloat16_parameters_leave_times_and_positions_exact(group) -> None:
    whole = randomise(build_denoiser(small_config(), CHANNELS))
    parts = randomise(build_denoiser(small_config(), CHANNELS))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    shard(parts, policy)
    tokens, lengths = batch(CASES)
    exact, rough = whole(tokens, local_attend(lengths)), parts(tokens, local_attend(lengths))
    assert rough.dtype == torch.float32
    assert (rough - exact).norm() < 0.05 * exact.norm()
    rough.square().sum().backward()
    assert all(parameter.grad.full_tensor().isfinite().all() for parameter in parts.parameters())


def test_sharding_laws():
    spawn([a_rank_without_rows_adds_nothing, bfloat16_parameters_leave_times_and_positions_exact], 2)
