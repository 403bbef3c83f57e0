"""The elastic planner's search: candidates are placed and repaired until one is good or none gets better."""

from knapformer.planners.bench import Bench
from knapformer.planners.candidates import candidates
from knapformer.planners.job import Job
from knapformer.planners.placing import place
from knapformer.planners.repair import even

# Ranks times candidates: after so many a plan in time is taken unhedged; so many without gain end the search.
IN_TIME, STALE = 32, 64


def search(job: Job) -> Bench | None:
    """The best of a fixed number of candidates: evenly loaded and hedged, else as near to it as one comes."""
    if not len(job.len_S):
        return Bench(job)
    best: Bench | None = None
    stale = 0
    for turn, candidate in enumerate(candidates(job)):
        if best is not None and candidate.total >= max(best.load_R) * job.ranks:
            continue
        bench = Bench(job)
        if not place(bench, candidate):
            continue
        bench, stale = _evened(bench), stale + 1
        if max(bench.tokens_R) <= job.cap and (best is None or rating(bench) < rating(best)):
            best, stale = bench, 0
        if best is None:
            continue
        late, shaky = rating(best)
        # Later candidates split more: worth it to be in time, not for the hedge alone, nor for its time.
        if (not late and (not shaky or turn * job.ranks >= IN_TIME)) or stale * job.ranks >= STALE:
            break
    return best


def rating(bench: Bench) -> tuple[int, int]:
    """How far the worst rank is beyond what is close to the bound, and beyond the hedge; less is better."""
    shaky = max(map(bench.shakiness, bench.load_R, bench.heads_R))
    return max(0, max(bench.load_R) - bench.job.close), max(0, shaky)


def _evened(bench: Bench) -> Bench:
    """First as fast as can be; then, if that reached the goal, hedged without leaving it."""
    even(bench, 4 * bench.job.ranks + 64)
    bench.hedged = True
    shaky = max(map(bench.excess_of, range(bench.job.ranks)))
    if max(bench.load_R) > bench.goal or shaky <= 0:
        return bench
    plain = bench.copy()
    even(bench, bench.job.ranks)
    return plain if max(bench.load_R) > bench.goal else bench
