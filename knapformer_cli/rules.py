"""What a setting may be beyond its type; what needs data or devices is checked by the launcher.

Keys are those of the command line; a setting that is unset (null) obeys every rule.
"""

from collections.abc import Mapping
from typing import Any

AT_LEAST = {
    "training.steps": 1,
    "training.batch_tokens": 1,
    "training.seed": 0,
    "training.max_tokens_per_rank": 1,
    "launch.ranks": 1,
    "launch.nodes": 1,
    "launch.restarts": 0,
    "launch.timeout": 1,
    "launch.window": 1,
    "launch.straggler": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 0,
    "sampling.every": 0,
    "sampling.steps": 1,
    "sampling.rows": 1,
    "sampling.guidance": 0,
    "logging.every": 1,
    "parallel.threads": 1,
    "balancer.domain": 1,
    "balancer.gamma": 0,
    "optimizer.clip": 0,
    "optimizer.weight_decay": 0,
    "scheduler.warmup": 0,
    "scheduler.steps": 1,
    "calibrate.shortest": 1,
    "calibrate.longest": 1,
    "calibrate.repeats": 1,
    "profile.ranks": 1,
    "profile.steps": 1,
}
SHARES = [
    "optimizer.ema",
    "optimizer.beta1",
    "optimizer.beta2",
    "training.caption_dropout",
    "scheduler.final",
    "cluster.linear_efficiency",
    "cluster.attention_efficiency",
    "cluster.overlap",
]
BETWEEN = {**dict.fromkeys(SHARES, (0, 1)), "launch.port": (0, 65535)}
POSITIVE = [
    "optimizer.lr",
    "optimizer.eps",
    "training.flow.std",
    "sampling.fps",
    "launch.peak_tflops",
    "calibrate.patience",
]
ONE_OF = {
    "scheduler.decay": ("constant", "cosine", "linear"),
    "parallel.dtype": ("auto", "float32", "bfloat16"),
    "logging.wandb": ("offline", "online", "disabled"),
    "launch.device": ("auto", "cpu", "cuda"),
}
SIDES = {"sampling.pictures": 2, "sampling.clips": 3}


def check_rules(values: Mapping[str, Any]) -> None:
    """Raise ValueError for the first value, by dotted key, that no run can mean."""
    given = {key: value for key, value in values.items() if value is not None}
    numbers = {key: value for key, value in given.items() if isinstance(value, float | int)}
    for key, number in numbers.items():
        if not abs(number) < 2**63:  # nan too
            raise ValueError(f"{key} is {number}; it must be a finite number below 2^63")
    for key, least in AT_LEAST.items():
        if key in given and given[key] < least:
            raise ValueError(f"{key} is {given[key]}; it must be at least {least}")
    for key, (low, high) in BETWEEN.items():
        if key in given and not low <= given[key] <= high:
            raise ValueError(f"{key} is {given[key]}; it must lie between {low} and {high}")
    for key, number in numbers.items():
        if (key in POSITIVE or key.startswith("cluster.")) and number <= 0:
            raise ValueError(f"{key} is {number}; it must be greater than 0")
    for key, words in ONE_OF.items():
        if given[key] not in words:
            raise ValueError(f"{key} is {given[key]!r}; it must be one of {', '.join(words)}")
    for key, count in SIDES.items():
        if len(given[key]) != count or min(given[key]) < 1:
            raise ValueError(f"{key} is {given[key]}; it must be {count} numbers of at least 1")
