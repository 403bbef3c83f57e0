"""AdamW, the learning-rate schedule, gradient clipping and the averaged weights."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from knapformer_cli.schema import OptimizerConfig, SchedulerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices only; gains, biases and embeddings of one dimension are left alone."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    free = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": free, "weight_decay": 0.0}]
    betas = config.beta1, config.beta2
    # Fused: one call over all shards, whose dispatch one by one would outweigh the update of a small model.
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def learning_rate(step: int, steps: int, peak: float, config: SchedulerConfig) -> float:
    """Learning rate of step 0..steps-1: linear warm-up, then constant or falling to `final` of the peak."""
    if step < config.warmup:
        return peak * (step + 1) / config.warmup
    if config.decay == "constant":
        return peak
    done = min(1.0, (step - config.warmup) / max(1, steps - 1 - config.warmup))
    left = 0.5 * (1 + math.cos(math.pi * done)) if config.decay == "cosine" else 1 - done
    return peak * (config.final + (1 - config.final) * left)


def clip_gradients(model: nn.Module, limit: float) -> float:
    """Scale the gradients to a global norm of at most `limit` (0: never); returns the norm before."""
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if limit:
        nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm.item()


class Average:
    """Exponential moving average of the parameters, sharded as they are; its decay warms up with the step."""

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay = model, decay
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, step: int) -> None:
        """Take in the parameters after optimizer step `step` (from 0)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(_local(self.weights.values()), _local(self.model.parameters()), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model holds the averaged weights inside the block, its own again after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # the root stays gathered after a forward without backward
        for ours, theirs in zip(_local(self.weights.values()), _local(self.model.parameters()), strict=True):
            held = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(held)


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's shards, or the tensors themselves where nothing is sharded."""
    return [t.to_local().detach() if isinstance(t, DTensor) else t.detach() for t in tensors]
