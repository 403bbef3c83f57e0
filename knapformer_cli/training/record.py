"""What a step says of itself: balance, utilization and memory, as metrics.jsonl keeps them.

S sequences, R ranks, P plans (one a micro-step).
"""

import resource
from collections.abc import Sequence

import numpy as np
import torch

from knapformer import RoutingPlan, WorkloadModel
from models.config import ModelConfig

# Dense bf16 peak of one device, TFLOP/s (vendors' data sheets, without sparsity).
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "H800": 989.0, "B200": 2250.0, "A100": 312.0, "A800": 312.0}


def balance(
    plans: Sequence[RoutingPlan], len_S: np.ndarray, home_S: np.ndarray, cost: WorkloadModel, ranks: int
) -> dict[str, float]:
    """Imbalance before and after planning; over micro-steps, slowest ranks summed over means summed."""
    if not len(len_S):  # every sample of the batch was lost
        names = ("work_max_over_mean_before", "work_max_over_mean_after")
        return {**dict.fromkeys(names, 1.0), "attention_sent": 0.0, "moved": 0.0, "peak_tokens": 0}
    before_R = np.bincount(home_S, cost.work(len_S), minlength=ranks)
    after_PR = np.stack([plan.work_R(cost) for plan in plans])
    tokens_P = np.array([plan.len_C.sum() for plan in plans])
    return {
        "work_max_over_mean_before": before_R.max() / before_R.mean(),
        "work_max_over_mean_after": after_PR.max(1).sum() / after_PR.mean(1).sum(),
        "attention_sent": np.average([plan.attention_sent() for plan in plans], weights=tokens_P),
        "moved": np.average([plan.moved() for plan in plans], weights=tokens_P),
        "peak_tokens": max(plan.peak_tokens() for plan in plans),
    }


def peak_tflops(device: torch.device, given: float | None, ranks: int) -> float | None:
    """TFLOP/s of all ranks: `given` of one device, else what its name tells, else None."""
    if given is None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        given = next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)
    return None if given is None else given * ranks


def utilization(model: ModelConfig, len_S: np.ndarray, seconds: float, tflops: float | None) -> float | None:
    """MFU: 24 L d^2 + 4 L^2 d FLOP a block forward, twice that backward, over the peak of all ranks."""
    if tflops is None:
        return None
    flop = 3 * model.depth * WorkloadModel.analytic(width=model.width, gamma=1.0).work(len_S).sum()
    return float(flop / (seconds * tflops * 1e12))


def memory_gib(device: torch.device) -> float:
    """Peak memory of this rank so far: on the GPU, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
