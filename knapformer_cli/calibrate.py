"""`knapformer calibrate`: the real model's seconds on this device, and a workload model that fits them."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from knapformer import WorkloadModel
from knapformer.layout import split_degrees
from knapformer_cli.calibration import Calibration, device_name, file_name, subject_of
from knapformer_cli.config import compose
from knapformer_cli.launch import choose_device
from knapformer_cli.measure import (
    Case,
    Subject,
    fitted_cases,
    grow_lengths,
    held_out_cases,
    measure,
    round_up,
)
from knapformer_cli.schema import Config
from knapformer_cli.training.parallel import choose_attention, compute_dtype, prepare_block
from models.denoiser import build_denoiser

MOST_ERROR = 0.3  # median, of steps held out; quiet machines have a tenth of it


def calibrate_command(overrides: Sequence[str]) -> None:
    """Measure, fit, print and save; ValueError for settings that cannot be measured."""
    config = compose(overrides)
    check_lengths(config)
    choose_device(config.launch)
    c, device = config.calibrate, torch.device(config.launch.device)
    folder = _folder(Path(c.folder))
    torch.set_num_threads(config.parallel.threads)
    subject = build_subject(config, device)
    degrees = _degrees(config)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("finding lengths", total=None)
        unit = math.lcm(*degrees)
        lengths = list(grow_lengths(subject, c.shortest, unit, c.patience, c.longest))
        cases = fitted_cases(lengths, degrees) + held_out_cases(lengths, degrees)
        bar.update(task, description="measuring", total=len(cases) * (c.repeats + 1))
        seconds = measure(subject, cases, c.repeats, lambda: bar.advance(task))
    calibration = fit(config, subject, cases, seconds)
    check(calibration)
    path = folder / file_name(calibration.device, calibration.subject)
    calibration.save(path, _rows(calibration, cases, seconds))
    plot(calibration, cases, seconds, config.balancer.gamma, path.with_suffix(".png"))
    report(calibration, cases, path)


def check_lengths(config: Config) -> None:
    """ValueError where three doubling lengths do not fit: with fewer, none lies between to judge the fit."""
    c, unit = config.calibrate, math.lcm(*_degrees(config))
    least = 4 * round_up(c.shortest, unit)
    if c.longest is not None and c.longest < least:
        raise ValueError(
            f"calibrate.longest is {c.longest} and calibrate.shortest is {c.shortest}; three lengths are "
            f"needed, each twice the one before and a multiple of {unit}, so longest must be at least {least}"
        )


def build_subject(config: Config, device: torch.device) -> Subject:
    """The model as a rank trains it, but for sharding: recomputed and compiled if so configured."""
    dtype = compute_dtype(config.parallel, device)
    torch.manual_seed(config.training.seed)
    with device:
        model = build_denoiser(config.model, config.data.channels).to(dtype)
    for blocks in [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]:
        for number, block in enumerate(blocks):
            blocks[number] = prepare_block(block, config.parallel)
    kernel = choose_attention(config.balancer.kernel, config.parallel, device)
    caption = config.data.max_text // 2  # of captions between none and the longest
    return Subject(model, config.model.heads, config.data.channels, kernel, device, caption)


def fit(config: Config, subject: Subject, cases: Sequence[Case], seconds: Sequence[float]) -> Calibration:
    """The calibration that the fitted cases give and the held-out ones judge."""
    tokens_N, squares_N, out_N = _columns(cases)
    y_N = np.array(seconds)
    cost, overhead = WorkloadModel.fit_steps(tokens_N[~out_N], squares_N[~out_N], y_N[~out_N])
    modelled_N = overhead + cost.linear * tokens_N + cost.quadratic * squares_N
    paper_N = paper_seconds(cases, seconds, config.model.width, config.balancer.gamma)
    dtype = str(compute_dtype(config.parallel, subject.device)).removeprefix("torch.")
    return Calibration(
        device=device_name(config.launch.device, config.parallel.threads),
        subject=subject_of(config, dtype),
        kernel=subject.kernel.name,
        cost=cost,
        overhead=overhead,
        gamma=6.0 * config.model.width * cost.quadratic / cost.linear if cost.linear else 0.0,
        held_out_error=_error(modelled_N[out_N], y_N[out_N]),
        gamma_error=_error(paper_N[out_N], y_N[out_N]),
        longest=max(length for case in cases for length, _ in case.chunks),
        date=time.strftime("%Y-%m-%d"),
        torch=torch.__version__,
    )


def check(calibration: Calibration) -> None:
    """ValueError for a fit that explains too little: plans would go by it without a word."""
    if calibration.held_out_error > MOST_ERROR:
        raise ValueError(
            f"the fit misses steps that were held out by {calibration.held_out_error:.0%} (median), and what "
            f"is saved misses {MOST_ERROR:.0%} at most; try a quiet machine or more calibrate.repeats"
        )


def paper_seconds(cases: Sequence[Case], seconds: Sequence[float], width: int, gamma: float) -> np.ndarray:
    """[N] what the paper's form says, scaled so that its median relative error over the fitted cases is 0."""
    tokens_N, squares_N, out_N = _columns(cases)
    paper = WorkloadModel.analytic(width, gamma)
    flop_N = paper.linear * tokens_N + paper.quadratic * squares_N
    return flop_N * np.median((np.array(seconds) / flop_N)[~out_N])


def report(calibration: Calibration, cases: Sequence[Case], path: Path) -> None:
    """What was found, on the console."""
    c, out = calibration, sum(case.held_out for case in cases)
    table = Table(
        show_header=False, title=f"{c.device}, {c.subject['parallel.dtype']}, attention by {c.kernel}"
    )
    for name, value in (
        ("a token", f"{c.cost.linear * 1e6:.4g} us"),
        ("a pair of tokens in attention", f"{c.cost.quadratic * 1e9:.4g} ns"),
        ("a step besides", f"{c.overhead * 1e3:.3g} ms"),
        ("gamma with the same ratio", f"{c.gamma:.3f}"),
        (f"median error of {out} steps held out of {len(cases)}", f"{c.held_out_error:.1%}"),
        ("the same of the paper's form, scaled", f"{c.gamma_error:.1%}"),
    ):
        table.add_row(name, value)
    console = Console()
    console.print(table)
    console.print(f"saved {path} and {path.with_suffix('.png').name}", highlight=False, soft_wrap=True)


def plot(
    calibration: Calibration, cases: Sequence[Case], seconds: Sequence[float], gamma: float, path: Path
) -> None:
    """Measured against modelled seconds, log-log: the fit, and the paper's form beside it."""
    from matplotlib.figure import Figure

    c, width = calibration, calibration.subject["model.width"]
    tokens_N, squares_N, out_N = _columns(cases)
    modelled_N = c.overhead + c.cost.linear * tokens_N + c.cost.quadratic * squares_N
    panels = (
        (f"calibrated: held-out error {c.held_out_error:.1%}", modelled_N),
        (
            f"paper's form, gamma {gamma:g}, scaled: {c.gamma_error:.1%}",
            paper_seconds(cases, seconds, width, gamma),
        ),
    )
    y_N, kinds = np.array(seconds), np.array([_kind(case) for case in cases])
    figure = Figure(figsize=(10, 4.8), dpi=120, layout="constrained")
    low = min(y_N.min(), *(x_N.min() for _, x_N in panels)) / 1.3
    high = max(y_N.max(), *(x_N.max() for _, x_N in panels)) * 1.3
    for number, (title, x_N) in enumerate(panels):
        axes = figure.add_subplot(
            1, 2, number + 1, xscale="log", yscale="log", xlim=(low, high), ylim=(low, high)
        )
        axes.plot([low, high], [low, high], color="0.6", linewidth=1, zorder=0)
        for kind, (color, marker) in KINDS.items():
            shown = kinds == kind
            for chosen, fill in ((shown & ~out_N, color), (shown & out_N, "none")):
                label = kind if fill == color else None
                axes.scatter(
                    x_N[chosen], y_N[chosen], marker=marker, facecolors=fill, edgecolors=color, label=label
                )
        axes.set(
            title=title, xlabel="modelled seconds a step", ylabel="" if number else "measured seconds a step"
        )
        axes.grid(True, which="major", alpha=0.25)
        axes.set_aspect("equal")
    figure.axes[0].legend(title="filled: fitted, hollow: held out", frameon=False, loc="upper left")
    figure.suptitle(c.device, fontsize=10, color="0.35")
    figure.savefig(path)


KINDS = {
    "one whole sequence": ("#1b6ca8", "o"),
    "one split sequence": ("#d1603d", "s"),
    "several sequences": ("#3a8f5c", "^"),
}


def _kind(case: Case) -> str:
    one_whole, one_split, several = KINDS
    if len(case.chunks) > 1:
        return several
    return one_whole if case.chunks[0][1] == 1 else one_split


def _columns(cases: Sequence[Case]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens_N, squares_N = (
        np.array(x, float) for x in zip(*((c.tokens, c.squares) for c in cases), strict=True)
    )
    return tokens_N, squares_N, np.array([case.held_out for case in cases])


def _error(modelled_N: np.ndarray, seconds_N: np.ndarray) -> float:
    return float(np.median(np.abs(modelled_N / seconds_N - 1)))


def _rows(calibration: Calibration, cases: Sequence[Case], seconds: Sequence[float]) -> list[dict[str, Any]]:
    return [
        {"chunks": list(map(list, case.chunks)), "held_out": case.held_out, "seconds": taken}
        for case, taken in zip(cases, seconds, strict=True)
    ]


def _degrees(config: Config) -> list[int]:
    """No split, some and the most: the model interpolates between them."""
    degrees = split_degrees(config.model.heads, config.balancer.domain, config.balancer.domain)
    return sorted({degrees[0], degrees[len(degrees) // 2], degrees[-1]})


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"calibrate.folder {path} cannot be written: {error.strerror}") from error
    return path
