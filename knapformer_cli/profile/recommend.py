"""Which layout to train with, and why, in one sentence."""

from collections.abc import Sequence

from knapformer_cli.profile.score import Scene, Score, settings_of

EQUAL = 1.005  # modelled times this close are equal: then the layout that moves fewest tokens is better


def best_of(scores: Sequence[Score], scene: Scene) -> Score:
    """The fastest layout that fits the device memory; among equals the one that moves and sends least."""
    fitting = [score for score in scores if fits(score, scene)] or list(scores)
    fastest = min(score.seconds for score in fitting)
    equal = [score for score in fitting if score.seconds <= fastest * EQUAL]
    return min(equal, key=lambda score: (round(score.moved_N.mean() + score.sent_N.mean(), 2), score.layout))


def fits(score: Score, scene: Scene) -> bool:
    """Whether its fullest rank needs no more than the memory of a device, as modelled."""
    return bool(score.memory_R.max() <= scene.cluster.memory)


def recommendation(scores: Sequence[Score], none: Score, scene: Scene, ideal: float) -> str:
    """One sentence: which of the layouts, what it gains over `none`, and the reason."""
    best = best_of(scores, scene)
    if not fits(best, scene):
        return _no_memory(best, scene)
    if best.layout == "none":
        return (
            "Leave the tokens where they are read (balancer.layout=none): the busiest rank has only "
            f"{none.work_N.mean():.3f} times the mean work, and no layout makes a modelled step faster "
            f"by more than {EQUAL - 1:.1%}."
        )
    settings = " ".join(settings_of(best.layout))
    gain = f"{none.seconds / best.seconds:.2f} times as fast, {ideal / best.seconds:.1%} of the ideal"
    return (
        f"Train with {settings}: a modelled step takes {best.seconds:#.3g} s instead of "
        f"{none.seconds:#.3g} s ({gain}), because the busiest rank has {best.work_N.mean():.3f} times the "
        f"mean work where the reading order gives it {none.work_N.mean():.2f}{_beside(best, scores, scene)}."
    )


def _beside(best: Score, scores: Sequence[Score], scene: Scene) -> str:
    """What the best bags would cost in traffic."""
    others = [score for score in scores if score.layout.startswith("g") and score is not best]
    if not others:
        return ""
    other = best_of(others, scene)
    return (
        f", at {best.sent_N.mean():.0%} of the tokens sent in each attention exchange and "
        f"{best.moved_N.mean():.0%} moved before it ({other.layout}: {other.sent_N.mean():.0%} and "
        f"{other.moved_N.mean():.0%})"
    )


def _no_memory(best: Score, scene: Scene) -> str:
    gib = 2**30
    room = scene.cluster.memory - best.memory_R.max() + best.peak_N.max() * scene.shape.token_bytes
    tokens = int(room // scene.shape.token_bytes)
    change = (
        f"set training.max_tokens_per_rank={tokens} and steps are cut into micro-steps"
        if tokens > 0
        else "the sharded model alone needs more, so take more ranks or a smaller model"
    )
    return (
        f"No layout fits the device memory: with {best.layout}, the best of them, the fullest rank needs "
        f"{best.memory_R.max() / gib:.0f} GiB of {scene.cluster.memory / gib:.0f} (modelled); {change}."
    )
