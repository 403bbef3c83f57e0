"""From overrides to what is profiled: the configuration, the mix of lengths, and what a run measured."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from knapformer import check_layout
from knapformer_cli.config import compose, from_yaml, load_config, to_yaml
from knapformer_cli.cost import cluster_of, load_cost, resolve_for_cluster, shape_of
from knapformer_cli.profile.mix import Mix, mix_of_codes, mix_of_file, mix_of_shards
from knapformer_cli.profile.run import Measured, read_run
from knapformer_cli.profile.score import Scene
from knapformer_cli.schema import Config
from models.config import check_model

# Lengths without pixels say nothing of the model that they are for: the paper's, and as the paper trains it.
OF_LENGTHS = {"model": "flux", "parallel": "fsdp_checkpointed", "experiment": "none"}
# What a run decided and a profile of it keeps; the cluster is the profile's own.
OF_A_RUN = ("model", "data", "balancer", "training", "parallel", "launch")


@dataclass(frozen=True, eq=False)
class Question:
    """What the user asks; `notes` say in words what was chosen for them."""

    config: Config
    scene: Scene
    measured: Measured | None
    notes: list[str]
    cost: str  # what plans, in words


def read_question(overrides: Sequence[str]) -> Question:
    """Compose, read the lengths, check the layouts; ValueError for the first thing that is wrong."""
    config, notes = resolve(overrides)
    mix, measured = checked_mix(config, overrides)
    calibration = resolve_for_cluster(config)
    cost, cost_words = load_cost(config, mix.ranks)
    scene = Scene(
        mix=mix,
        cluster=cluster_of(config.cluster, mix.ranks),
        shape=shape_of(config),
        cost=cost,
        seconds=calibration.cost if calibration else None,
        domain=config.balancer.domain,
        max_tokens=config.training.max_tokens_per_rank,
    )
    return Question(config, scene, measured, notes, cost_words)


def checked_mix(config: Config, overrides: Sequence[str]) -> tuple[Mix, Measured | None]:
    """The lengths, for a model and layouts that can be; asks for no calibration and no device."""
    check_model(config.model)
    mix, measured = read_mix(config, _keys(overrides))
    config.profile.ranks = mix.ranks
    for layout in config.profile.layouts:
        check_layout(layout, ranks=mix.ranks, heads=config.model.heads, domain=config.balancer.domain)
    return mix.ordered(), measured


def resolve(overrides: Sequence[str]) -> tuple[Config, list[str]]:
    """The configuration with the defaults of a profile; overrides win over them, and over those of a run."""
    keys, given = _keys(overrides), list(overrides)
    if not keys & {"run.name", "run.dir"}:
        given.append("run.name=profile")
    chosen = [f"{key}={value}" for key, value in OF_LENGTHS.items() if key not in keys]
    # Composing takes half a second, so lengths without pixels are told from the overrides where they can be.
    alone = bool(keys & {"data.codes", "profile.lengths"}) or "data=paper_" in " ".join(overrides)
    config = compose([*chosen, *given] if alone else given)
    p = config.profile
    origins = {"profile.run": p.run, "profile.lengths": p.lengths, "data.codes": config.data.codes}
    asked = [f"{key}={value}" for key, value in origins.items() if value]
    if len(asked) > 1:
        raise ValueError(f"{asked[0]} and {asked[1]} are two origins of lengths; give one")
    if p.run:
        return _with_run(given, keys, load_config(Path(p.run) / "config.yaml"))
    if asked and not alone:
        config = compose([*chosen, *given])
    notes = [f"lengths alone name no model, so {' '.join(chosen)}"] if asked and chosen else []
    return config, notes


def _with_run(given: list[str], keys: set[str], run: Config) -> tuple[Config, list[str]]:
    notes = []
    if run.launch.device == "cpu" and "cluster" not in keys:
        given = ["cluster=cpu", *given]
        notes.append("the run was on CPUs, so cluster=cpu")
    cost = run.balancer.cost
    if cost not in ("auto", "analytic", "cluster") and not Path(cost).is_file():
        run.balancer.cost = "auto"
        notes.append(f"the run planned with {cost}, which is not here, so balancer.cost=auto")
    ours = OmegaConf.structured(compose(given))
    merged = copy.deepcopy(ours)
    theirs = OmegaConf.structured(run)
    for section in OF_A_RUN:
        merged[section] = theirs[section]
    for key in sorted(keys):
        if key.split(".")[0] in OF_A_RUN:
            OmegaConf.update(merged, key, OmegaConf.select(ours, key))
    return from_yaml(to_yaml(OmegaConf.to_object(merged))), notes  # type: ignore[arg-type]


def read_mix(config: Config, keys: set[str]) -> tuple[Mix, Measured | None]:
    """The lengths that the configuration asks for, and what was measured where they come from a run."""
    p, seed = config.profile, config.training.seed
    if p.run:
        mix, measured = read_run(Path(p.run), config.balancer.layout, p.steps)
        if "profile.ranks" in keys and p.ranks != mix.ranks:
            raise ValueError(f"profile.ranks={p.ranks} is not the {mix.ranks} ranks of the run {p.run}")
        return mix, measured
    if p.lengths:
        return mix_of_file(Path(p.lengths), p.ranks, p.steps, config.training.batch_tokens), None
    if config.data.codes:
        return mix_of_codes(config.data.codes, p.ranks, p.steps, seed), None
    return mix_of_shards(config), None


def _keys(overrides: Sequence[str]) -> set[str]:
    return {override.split("=", 1)[0].lstrip("+~") for override in overrides}
