"""One rank's training run: everything is wired here, and the step is short enough to read."""

import math
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from data.loader import Loader
from data.manifest import open_manifest
from data.samples import Sample
from knapformer import (
    RoutingPlan,
    VarlenKernel,
    WorkloadModel,
    bind_attention,
    make_domain_group,
    plan_micro_steps,
)
from knapformer_cli.config import to_yaml
from knapformer_cli.cost import load_cost, resolve_for_machine
from knapformer_cli.failures import host
from knapformer_cli.schema import Config
from knapformer_cli.training import checkpoint, phase, preempt
from knapformer_cli.training.ahead import Preempted, Prepared, prepare_ahead
from knapformer_cli.training.batch import drop_captions, flow_loss, route_batch
from knapformer_cli.training.gallery import save_clips, save_pictures
from knapformer_cli.training.metrics import Metrics, wandb_id
from knapformer_cli.training.optimizer import Average, build_optimizer, clip_gradients, learning_rate
from knapformer_cli.training.pace import Pace, Paces
from knapformer_cli.training.parallel import SharedError, World, agree, choose_attention, parallelize
from knapformer_cli.training.record import balance, memory_gib, peak_tflops, utilization
from knapformer_cli.training.sampling import Size, draw_shared, whole_attention
from models.codec import PixelCodec
from models.denoiser import build_denoiser


def train(config: Config, world: World) -> None:
    """Train to `training.steps`, with checkpoints and samples on the way and at the end.

    A signal that asked for it (`preempt.py`) ends the run at a step, saved and marked as preempted.
    Raises ValueError, on every rank, for what a user can cause.
    """
    if world.rank == 0:
        preempt.clear_marker(Path(config.run.dir))
    trainer = Trainer(config, world)
    first, last = trainer.progress.step, config.training.steps
    batches, sources = iter(trainer.loader), sorted(config.data.sources)
    steps = prepare_ahead(
        batches, trainer.edit, sources, trainer.plan, trainer.pace, last - first, world.ahead_group
    )
    with trainer.metrics or nullcontext(), closing(steps):
        trainer.announce()
        for prepared, waited in steps:
            if isinstance(prepared, Preempted):
                return trainer.leave(prepared.signal)
            trainer.step(prepared, waited)
            done = trainer.progress.step
            if _due(done, config.checkpoint.every) and done < last:
                trainer.save()
            if _due(done, config.sampling.every) and done < last:
                trainer.draw()
        if trainer.progress.step > first:
            trainer.save()
            trainer.draw()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class Trainer:
    """What outlives a step, and what a step does with it."""

    def __init__(self, config: Config, world: World):
        self.config, self.world, self.folder = config, world, Path(config.run.dir)
        self.kernel = agree(self._choose_attention, world.cpu_group)
        self.domain_group = make_domain_group(world.group, config.balancer.domain, world.timeout)
        self.cost, self.cost_name = self._load_cost()
        self.codec = PixelCodec(config.data.patch, config.data.patch_time)
        self.model = self._build_model()
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.average = Average(self.model, config.optimizer.ema)
        self.progress = self._resume()
        self.saved_step = self.progress.step
        launch, hosts = config.launch, world.hosts or (host(),) * world.ranks
        self.pace, self.paces = Pace(world.device), Paces(hosts, launch.straggler, launch.window)
        self.manifest = agree(lambda: open_manifest(config.data), world.cpu_group)
        agree(self._check_same_data, world.cpu_group)
        self.loader = agree(self._open_loader, world.cpu_group)
        self.metrics = self._open_metrics() if world.rank == 0 else None

    def _build_model(self) -> nn.Module:
        """The same weights for any number of ranks: rank 0 draws all of them, and each takes its shard."""
        config, first = self.config, self.world.rank == 0
        torch.manual_seed(config.training.seed)
        with torch.device("cpu" if first else "meta"):
            whole = build_denoiser(config.model, config.data.channels)
        weights = whole.state_dict() if first else {}
        model = parallelize(whole.to("meta"), config.parallel, self.world).to_empty(device=self.world.device)
        everywhere = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, weights, options=everywhere)
        return model

    def _choose_attention(self) -> VarlenKernel:
        return choose_attention(self.config.balancer.kernel, self.config.parallel, self.world.device)

    def _load_cost(self) -> tuple[WorkloadModel, str]:
        """What rank 0 reads, on its own device: all ranks must plan with the same numbers."""
        config, first, group = self.config, self.world.rank == 0, self.world.cpu_group

        def load() -> tuple[WorkloadModel, str]:
            resolve_for_machine(config)  # again: a launcher may sit on another kind of machine
            return load_cost(config, self.world.ranks)

        held = [agree(lambda: load() if first else None, group)]
        dist.broadcast_object_list(held, src=0, group=group)
        assert held[0] is not None
        return held[0]

    def _resume(self) -> checkpoint.Progress:
        """Load the checkpoint that rank 0 finds: on a slow shared disk the ranks might see different ones.

        A run that was interrupted goes on from its own, wherever it once began.
        """
        c, first, group = self.config.checkpoint, self.world.rank == 0, self.world.cpu_group
        folder = self.folder / "checkpoints"

        def find() -> Path | None:
            return checkpoint.find_checkpoint(
                "auto" if checkpoint.complete_checkpoints(folder) else c.resume, folder
            )

        held = [agree(lambda: find() if first else None, group)]
        dist.broadcast_object_list(held, src=0, group=group)
        found = held[0]
        if found is None:
            return checkpoint.Progress(0, 0, 0, None, wandb_id(self.folder) if first else "")
        checkpoint.load(found, self.model, self.optimizer, self.average.weights)
        return agree(lambda: checkpoint.read_progress(found), group)

    def _check_same_data(self) -> None:
        """Every rank computes the order of batches from its own manifest, so the manifests must be equal."""
        ours = {**self.manifest.digests(), "samples": str(self.manifest.samples)}
        seen: list[dict[str, str]] = [{}] * self.world.ranks
        dist.all_gather_object(seen, ours, group=self.world.cpu_group)
        for rank, theirs in enumerate(seen):
            differ = sorted(
                name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
            )
            if differ:
                raise ValueError(
                    f"rank {rank} sees other data than rank {self.world.rank}: {differ[0]} differs"
                )

    def _open_loader(self) -> Loader:
        t, w = self.config.training, self.world
        return Loader(
            self.config.data,
            self.manifest,
            batch_tokens=t.batch_tokens,
            rank=w.rank,
            ranks=w.ranks,
            seed=t.seed,
            state=self.progress.loader,
        )

    def _open_metrics(self) -> Metrics:
        return Metrics(self.folder, self.config, self.progress.wandb_id, self.progress.step)

    def announce(self) -> None:
        """Say once what runs where."""
        w, b = self.world, self.config.balancer
        count = sum(p.numel() for p in self.model.parameters())
        self._say(
            f"{self.folder}: {count / 1e6:.1f} M parameters, {w.ranks} ranks on {w.device.type}, "
            f"layout {b.layout} planned by {self.cost_name}, attention by {self.kernel.name}"
        )
        done, steps = self.progress.step, self.config.training.steps
        if done >= steps:
            self._say(f"nothing to do: the run is at step {done}, and training.steps is {steps}")
        elif done:
            self._say(f"resumed at step {done} of {steps}")

    def edit(self, samples: list[Sample]) -> list[Sample]:
        """What training does to samples before their lengths are known."""
        return drop_captions(samples, self.config.training.caption_dropout, self.config.training.seed)

    def plan(self, len_S: np.ndarray, home_S: np.ndarray) -> tuple[RoutingPlan, ...]:
        try:
            return plan_micro_steps(
                len_S,
                home_S,
                ranks=self.world.ranks,
                layout=self.config.balancer.layout,
                heads=self.config.model.heads,
                cost=self.cost,
                domain=self.config.balancer.domain,
                max_tokens=self.config.training.max_tokens_per_rank,
            )
        except ValueError as error:  # the same on every rank, in the library's words; a user sets keys
            words = str(error).replace("max_tokens", "training.max_tokens_per_rank")
            raise SharedError(words) from error

    def step(self, prepared: Prepared, waited: float) -> None:
        """One optimizer step over the global batch."""
        begin, busy = time.perf_counter(), time.thread_time()
        o, number = self.config.optimizer, self.progress.step
        phase.mark(number)
        loss, route_seconds = self._gradients(prepared)
        norm = clip_gradients(self.model, o.clip)
        if not math.isfinite(norm):  # of all ranks' gradients, so all ranks know
            raise SharedError(
                f"the gradient norm is {norm} at step {number + 1}; lower optimizer.lr or optimizer.clip, "
                "and go on from the last checkpoint"
            )
        scheduler = self.config.scheduler
        lr = learning_rate(number, scheduler.steps or self.config.training.steps, o.lr, scheduler)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update(number)
        self.pace.work()
        batch, done = prepared.batch, self.progress
        self.progress = replace(
            done,
            step=number + 1,
            samples=done.samples + len(batch.id_S),
            tokens=done.tokens + int(batch.len_S.sum()),
            loader=prepared.loader_state,
        )
        if self.metrics is not None and (slow := self.paces.compare(number + 1, prepared.pace_R2)):
            self._say(slow)
        if _due(number + 1, self.config.logging.every):
            times = {
                "step": waited + time.perf_counter() - begin,
                "data": waited,
                "route": route_seconds,
                "busy": time.thread_time() - busy,
            }
            self._log(prepared, loss, norm, lr, times)

    def _gradients(self, prepared: Prepared) -> tuple[Tensor, float]:
        """Add up the gradients of all micro-steps; returns this rank's share of the loss and routing seconds.

        Each micro-step reduces its gradients at once: a memory cap that cuts the batch should not be paid
        back in unsharded gradients.
        """
        t, w, batch = self.config.training, self.world, prepared.batch
        visual = max(1, int(batch.visual_S.sum()))
        total, route_seconds = torch.zeros((), device=w.device), 0.0
        for plan in prepared.plans:
            phase.mark()
            begin = time.perf_counter()
            arrived = route_batch(prepared.samples, batch, plan, w, self.config.data.channels)
            attend = bind_attention(plan, self.domain_group, kernel=self.kernel, device=w.device)
            route_seconds += time.perf_counter() - begin
            clean_VC = self.codec.encode(arrived.patch_VC)
            error = flow_loss(self.model, arrived, attend, t.flow, clean_VC, t.seed, self.progress.step)
            (error * (w.ranks / visual)).backward()  # FSDP averages over ranks, and this is a sum
            total += error.detach() / visual
        return total, route_seconds

    def _log(self, prepared: Prepared, loss: Tensor, norm: float, lr: float, times: dict[str, float]) -> None:
        mine_M = torch.tensor([loss.item(), *times.values()], dtype=torch.float64)
        share_RM = mine_M.new_empty(self.world.ranks, len(mine_M))
        dist.all_gather(list(share_RM.unbind()), mine_M, group=self.world.cpu_group)
        if self.metrics is None:
            return
        share_MR = dict(zip(("loss", *times), share_RM.T.numpy(), strict=True))
        seconds = {name: float(share_MR[name].max()) for name in times}
        busy_R = share_MR["busy"]
        batch, model = prepared.batch, self.config.model
        peak = peak_tflops(self.world.device, self.config.launch.peak_tflops, self.world.ranks)
        values = {
            "loss": sum(share_MR["loss"].tolist()),
            "grad_norm": norm,
            "lr": lr,
            "tokens": self.progress.tokens,
            "samples": self.progress.samples,
            "lost_samples": prepared.lost,
            "tokens_per_second": int(batch.len_S.sum()) / seconds["step"],
            "step_seconds": seconds["step"],
            "data_seconds": seconds["data"],
            "plan_seconds": prepared.plan_seconds,
            "route_seconds": seconds["route"],
            "micro_steps": len(prepared.plans),
            **balance(prepared.plans, batch.len_S, batch.home_S, self.cost, self.world.ranks),
            "busy_seconds": busy_R.tolist(),
            # Processor time means nothing where the work is on a GPU.
            "busy_max_over_mean": busy_R.max() / busy_R.mean() if self.world.device.type == "cpu" else None,
            "pace_max_over_median": self.paces.max_over_median,
            "slow_ranks": self.paces.slow,
            "mfu": utilization(model, batch.len_S, seconds["step"], peak),
            "memory_gib": memory_gib(self.world.device),
        }
        self.metrics.log(self.progress.step, values)
        sources = sorted(self.config.data.sources)
        self.metrics.log_lengths(self.progress.step, batch, sources, self.world.ranks)

    def save(self) -> None:
        phase.mark(self.progress.step)
        c = self.config
        path = checkpoint.save(
            self.folder / "checkpoints",
            self.progress,
            to_yaml(c),
            self.model,
            self.optimizer,
            self.average.weights,
            c.checkpoint.keep,
            self.world.cpu_group,
        )
        self._say(f"saved {path}")
        self.saved_step = self.progress.step

    def leave(self, number: int) -> None:
        """Save what is done since the last checkpoint and mark the run as preempted by this signal."""
        done, folder = self.progress.step, self.folder
        if done > self.saved_step:
            self.save()
        if self.world.rank == 0:
            kept = checkpoint.complete_checkpoints(folder / "checkpoints")
            preempt.write_marker(folder, done, kept[-1].name if kept else None, number)

    def draw(self) -> None:
        """Draw the sample prompts with the averaged weights, into RUN/samples (collective)."""
        s, step = self.config.sampling, self.progress.step
        phase.mark(step)
        if self.metrics is not None:
            self.metrics.busy_with("drawing samples")
        height, width = s.pictures
        frames, clip_height, clip_width = s.clips
        with self.average.applied():
            pictures = self._draw(s.prompts, (1, height, width))
            clips = self._draw(s.clip_prompts, (frames, clip_height, clip_width))
        written, folder = [], self.folder / "samples"
        if pictures:
            written += save_pictures(folder / f"{step:010d}-pictures.png", s.prompts, pictures)
        if clips:
            written += save_clips(folder / f"{step:010d}-clips.gif", s.clip_prompts, clips, s.fps)
        if self.metrics is not None:
            self.metrics.pictures(step, written)

    def _draw(self, prompts: Sequence[str], size: Size) -> list[np.ndarray]:
        if not prompts:
            return []
        attention = whole_attention(self.kernel, self.world.device)
        return draw_shared(self.model, attention, prompts, size, self.config, self.world)

    def _say(self, text: str) -> None:
        if self.metrics is not None:
            self.metrics.say(text)
