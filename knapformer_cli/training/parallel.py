"""What depends on being many ranks: process groups, device, sharded parameters, shared errors."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from knapformer import VarlenKernel, choose_kernel
from knapformer_cli.failures import host
from knapformer_cli.schema import LaunchConfig, ParallelConfig

Result = TypeVar("Result")


@dataclass(frozen=True)
class World:
    """This rank's place in the job. `group` moves tokens and gradients, the CPU groups carry metadata."""

    rank: int
    ranks: int
    device: torch.device
    group: dist.ProcessGroup
    cpu_group: dist.ProcessGroup
    ahead_group: dist.ProcessGroup  # for the thread that prepares the next step, and for nothing else
    hosts: tuple[str, ...] = ()  # by rank
    timeout: timedelta | None = None  # of collectives


class SharedError(ValueError):
    """A user's error that every rank raises, because all of them know of it."""


def attempt(work: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """The result of work(), or in words the error that it met."""
    try:
        return work(), None
    except ValueError as error:
        return None, str(error)
    except (OSError, RuntimeError) as error:  # a disk, a socket, a decoding process
        return None, f"{type(error).__name__}: {error}"


def share_error(message: str | None, group: dist.ProcessGroup) -> None:
    """Raise on every rank of `group` the first error that any of them met; collective."""
    messages: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, message, group=group)
    met = [text for text in messages if text is not None]
    if met:
        raise SharedError(met[0])


def agree(work: Callable[[], Result], group: dist.ProcessGroup) -> Result:
    """The result of work() on this rank, or on every rank of `group` the error that any of them met."""
    result, message = attempt(work)
    share_error(message, group)
    return result  # type: ignore[return-value]


@contextmanager
def distributed_world(
    launch: LaunchConfig, threads: int, store: dist.Store, rank: int, ranks: int
) -> Iterator[World]:
    """Join the job whose ranks meet at `store`, and leave it at the end."""
    torch.set_num_threads(threads)
    cuda = launch.device == "cuda" or (launch.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    patience = timedelta(seconds=launch.timeout)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=patience)
    group = dist.group.WORLD
    assert group is not None
    cpu_group, ahead_group = (dist.new_group(backend="gloo", timeout=patience) for _ in range(2))
    hosts = [""] * ranks
    dist.all_gather_object(hosts, host(), group=cpu_group)
    yield World(rank, ranks, device, group, cpu_group, ahead_group, tuple(hosts), patience)
    # Not after an error: the others would fail on this rank's absence before it has said why.
    dist.destroy_process_group()


def parallelize(model: nn.Module, config: ParallelConfig, world: World) -> nn.Module:
    """Checkpoint, compile and shard each block in place, then the whole; weights may still be on meta."""
    mesh = init_device_mesh(world.device.type, (world.ranks,), mesh_dim_names=("shard",))
    dtype = compute_dtype(config, world.device)
    # The model casts what it is given where it must: flow times and positions would not survive bfloat16.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for blocks in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
        for number, block in enumerate(blocks):
            blocks[number] = prepare_block(block, config)
            fully_shard(blocks[number], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def prepare_block(block: nn.Module, config: ParallelConfig) -> nn.Module:
    """The block as it computes: recomputed in backward, and compiled, where the configuration says so."""
    if config.activation_checkpointing:
        block = checkpoint_wrapper(block)
    if config.compile:
        block.compile()
    return block


def choose_attention(kernel: str, config: ParallelConfig, device: torch.device) -> VarlenKernel:
    """The backend that balancer.kernel names; in float32 there is only SDPA."""
    wide = compute_dtype(config, device) is torch.float32
    if wide and kernel not in ("auto", "sdpa"):
        raise ValueError(f"balancer.kernel={kernel} computes in bfloat16; parallel.dtype=float32 needs sdpa")
    return choose_kernel("sdpa" if wide else kernel, device)


def compute_dtype(config: ParallelConfig, device: torch.device) -> torch.dtype:
    return getattr(torch, config.dtype_on(device.type))
