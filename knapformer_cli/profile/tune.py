"""The best static bag spec for a mix: every small one on a few steps, then hill climbing from the best."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from knapformer.layout import check_layout, parse_bags, split_degrees
from knapformer_cli.profile.score import CannotPlan, Scene, score_layout

COARSE_STEPS = 3
COARSE_RANKS = 32  # a spec of more ranks is one of fewer, repeated or scaled, until the climb changes it
CLIMBS = 3


def tune_static(scene: Scene, done: Callable[[], None] = lambda: None) -> tuple[str, int]:
    """(spec of least mean modelled seconds that was found, specs tried); `done` is called after each.

    Deterministic. Ties fall to the spec that comes first in the alphabet.
    """
    few = replace(scene, mix=scene.mix.first(COARSE_STEPS))
    tried: dict[str, float] = {}

    def best_of(specs: Sequence[str]) -> list[str]:
        """All of them, fastest first; those that cannot be planned come last."""
        for spec in specs:
            if spec not in tried:
                tried[spec] = _seconds(few, spec)
                done()
        return sorted(specs, key=lambda spec: (tried[spec], spec))

    peaks = []
    for spec in best_of(coarse_specs(scene))[:CLIMBS]:
        while (near := best_of(neighbours(spec, scene))) and tried[near[0]] < tried[spec]:
            spec = near[0]
        peaks.append(spec)
    return min(dict.fromkeys(peaks), key=lambda spec: (_seconds(scene, spec), spec)), len(tried)


def coarse_specs(scene: Scene) -> list[str]:
    """Every mixture of bags over one, two and four domains, repeated over the job and scaled to it."""
    ranks, specs = scene.mix.ranks, []
    domain = min(scene.domain, ranks)
    degrees = split_degrees(scene.shape.heads, ranks, domain)
    for width in dict.fromkeys((domain, 2 * domain, 4 * domain, min(ranks, COARSE_RANKS))):
        if width <= max(domain, COARSE_RANKS) and ranks % width == 0:
            for counts in _mixtures(degrees, width):
                specs.append(_spec(dict(zip(degrees, counts, strict=True))))
                scaled = [count * (ranks // width) for count in counts]
                specs.append(_spec(dict(zip(degrees, scaled, strict=True))))
    return [spec for spec in dict.fromkeys(specs) if _allowed(spec, scene)]


def neighbours(spec: str, scene: Scene) -> list[str]:
    """Specs in which some ranks have gone from bags of one size to bags of another."""
    bags = dict(parse_bags(spec))
    degrees = split_degrees(scene.shape.heads, scene.mix.ranks, scene.domain)
    found = []
    for large in (1, 4, 16, 64):
        for source, target in ((a, b) for a in bags for b in degrees if a != b):
            moved = large * math.lcm(source, target)
            if moved <= source * bags[source]:
                changed = {**bags, target: bags.get(target, 0) + moved // target}
                changed[source] -= moved // source
                found.append(_spec(changed))
    return [near for near in dict.fromkeys(found) if _allowed(near, scene)]


def _mixtures(degrees: Sequence[int], width: int) -> Iterator[list[int]]:
    """Counts of bags of each size that fill `width` ranks."""
    if len(degrees) == 1:
        if width % degrees[0] == 0:
            yield [width // degrees[0]]
        return
    for count in range(width // degrees[-1] + 1):
        for rest in _mixtures(degrees[:-1], width - count * degrees[-1]):
            yield [*rest, count]


def _spec(bags: dict[int, int]) -> str:
    return "+".join(f"g{size}n{count}" for size, count in sorted(bags.items()) if count)


def _allowed(spec: str, scene: Scene) -> bool:
    try:
        check_layout(spec, ranks=scene.mix.ranks, heads=scene.shape.heads, domain=scene.domain)
    except ValueError:
        return False
    return True


def _seconds(scene: Scene, spec: str) -> float:
    """Mean modelled seconds of a step; infinite where a step cannot be planned, e.g. for memory."""
    try:
        return score_layout(scene, spec).seconds
    except CannotPlan:
        return math.inf
