"""The elastic planner's repairs: take from the rank that is furthest beyond its limits what another can take.

Every repair lowers the worst of the ranks that it touches.
"""

from bisect import bisect_left
from heapq import nsmallest

from knapformer.planners.bench import Bench

Pieces = list[tuple[int, int]]  # (load, piece), ascending


# Plans that come to their goal meet few ranks that cannot be helped; after more the search goes on elsewhere.
PATIENCE = 4
# Pieces that one may be swapped for.
MOST_SWAPPED = 12


def even(bench: Bench, steps: int) -> None:
    """Repair the worst rank, again and again, until none is beyond its limits or too many are stuck."""
    excess_R = [bench.excess_of(rank) for rank in range(bench.job.ranks)]
    stuck: set[int] = set()
    failures = 0
    for _ in range(steps):
        worst = max(excess_R)
        if worst <= 0:
            return
        hot = excess_R.index(worst)
        bench.touched.clear()
        if not _repair(bench, hot, worst):
            failures += 1
            if failures > PATIENCE:
                return
            excess_R[hot] = 0
            stuck.add(hot)
            continue
        # What moved may help ranks of the same block that were given up.
        bench.touched.update(r for r in stuck if bench.block_R[r] == bench.block_R[hot])
        stuck -= bench.touched
        for rank in bench.touched:
            excess_R[rank] = bench.excess_of(rank)


def _repair(bench: Bench, hot: int, excess: int) -> bool:
    """The cheapest repair that helps: pour tokens, swap pieces, split a whole sequence, level with peers."""
    load, heads = bench.load_R[hot], bench.heads_R[hot]
    if load - bench.goal == excess:
        if bench.pour(hot, bench.goal, bench.goal) or _swap_with_any(bench, hot, excess, bench.load_R, 2):
            return True
        return _divide(bench, hot) or _level(bench, hot)
    if load - heads // 5 - bench.job.goal_down == excess:
        return _swap_with_any(bench, hot, excess, [-h for h in bench.heads_R], 4)
    if bench.pour(hot, load - excess, bench.goal):
        return True
    heat_R = [load + heads // 3 for load, heads in zip(bench.load_R, bench.heads_R, strict=True)]
    return _swap_with_any(bench, hot, excess, heat_R, 4)


def _swap_with_any(bench: Bench, hot: int, excess: int, heat_R: list[int], count: int) -> bool:
    """Swap with one of the coolest ranks, by heat_R, of the block, else of all."""
    block = [(heat_R[r], r) for r in bench.blocks[bench.block_R[hot]]]
    near = [r for _, r in nsmallest(count, block)]
    if any(_swap(bench, hot, cool, excess) for cool in near if cool != hot):
        return True
    if len(block) == len(heat_R):
        return False
    far = [r for _, r in nsmallest(count, zip(heat_R, range(len(heat_R)), strict=True))]
    return any(_swap(bench, hot, cool, excess) for cool in far if cool != hot and cool not in near)


def _swap(bench: Bench, hot: int, cool: int, excess: int) -> bool:
    """Exchange pieces so that the worse of both ranks gets best, then the fewest tokens leave home."""
    least, most = bench.load_R[hot] - bench.goal, bench.goal - bench.load_R[cool]
    gives, takes = _movable(bench, hot, cool), _movable(bench, cool, hot)
    # Worse than this, or no more than a crawl of tiny gains, is not worth a swap.
    bar = max(1, excess - (bench.goal >> 10))
    capped = bench.tokens_R[hot] + bench.tokens_R[cool] > bench.cap
    best: tuple[int, int, list[int], list[int]] | None = None
    for options in (_pairs, _sets):
        for after, change, go, back in sorted(options(gives, takes, least, most, bar)):
            if after >= bar:
                break
            if bench.hedged:
                after = _excess_after(bench, hot, cool, go, back, change)
            if after >= bar or (capped and not _fits(bench, go, back, hot, cool)):
                continue
            strays = _strays(bench, go, hot, cool) + _strays(bench, back, cool, hot)
            if best is None or (after, strays, go, back) < best:
                best = (after, strays, go, back)
                bar = after + 1
        if best and not best[0]:
            break
    if best is None:
        return False
    for piece in best[2]:
        bench.move(piece, cool)
    for piece in best[3]:
        bench.move(piece, hot)
    return True


def _excess_after(bench: Bench, hot: int, cool: int, go: list[int], back: list[int], change: int) -> int:
    heads = sum([bench.heads[p] for p in go]) - sum([bench.heads[p] for p in back])
    hot_after = bench.excess(bench.load_R[hot] - change, bench.heads_R[hot] - heads)
    cool_after = bench.excess(bench.load_R[cool] + change, bench.heads_R[cool] + heads)
    return max(hot_after, cool_after, 0)


def _movable(bench: Bench, rank: int, to: int) -> Pieces:
    pieces = [(bench.load[p], p) for p in bench.wholes_R[rank]]
    if bench.block_R[rank] == bench.block_R[to]:
        pieces += [(bench.load[p], p) for p in bench.shards_R[rank] if bench.may_go(p, to)]
    return sorted(pieces)


Option = tuple[
    int, int, list[int], list[int]
]  # beyond [least, most], change of load, pieces to go, to come back


def _pairs(gives: Pieces, takes: Pieces, least: int, most: int, bar: int) -> list[Option]:
    """Each piece alone; if none will do, against the one that brings the change nearest to the middle."""
    few = _some(gives, 12)
    alone: list[Option] = [(max(least - load, load - most, 0), load, [piece], []) for load, piece in few]
    options = [option for option in alone if option[0] < bar]
    if any(option[0] == 0 for option in options):
        return options
    middle = (least + most) // 2
    for load, piece in few:
        at = bisect_left(takes, (load - middle, -1))
        for other, partner in takes[max(at - 1, 0) : at + 1]:
            change = load - other
            after = max(least - change, change - most, 0)
            if after < bar:
                options.append((after, change, [piece], [partner]))
    return options


def _sets(gives: Pieces, takes: Pieces, least: int, most: int, bar: int) -> list[Option]:
    """Each piece of one rank against as many of the other, largest first, as the change wants."""
    options = []
    low, high = (least, most) if least <= most else ((least + most) // 2,) * 2
    for load, piece in _some(gives, 8):
        held, back = _filling(takes, load - low)
        options.append((load - held, [piece], back))
    for load, piece in _some(takes, 8):
        held, go = _filling(gives, load + high)
        options.append((held - load, go, [piece]))
    rated = [(max(least - change, change - most, 0), change, go, back) for change, go, back in options]
    return [option for option in rated if option[0] < bar]


def _some(pieces: Pieces, count: int) -> Pieces:
    """At most about `count` of the pieces, the largest among them: a rank may hold thousands."""
    return pieces[:: -max(1, len(pieces) // count)]


def _filling(pieces: Pieces, room: int) -> tuple[int, list[int]]:
    chosen: list[int] = []
    left, end = room, len(pieces)
    while len(chosen) < MOST_SWAPPED and (end := bisect_left(pieces, (left + 1, -1), 0, end)):
        end -= 1
        left -= pieces[end][0]
        chosen.append(pieces[end][1])
    return room - left, chosen


def _fits(bench: Bench, go: list[int], back: list[int], hot: int, cool: int) -> bool:
    """Whether both ranks' tokens stay under the cap."""
    grown = sum([bench.tokens[p] for p in go]) - sum([bench.tokens[p] for p in back])
    return bench.tokens_R[cool] + grown <= bench.cap and bench.tokens_R[hot] - grown <= bench.cap


def _strays(bench: Bench, pieces: list[int], here: int, there: int) -> int:
    """Tokens away from home after the step less those before."""
    return sum([bench.tokens[p] * ((there != bench.home[p]) - (here != bench.home[p])) for p in pieces])


def _divide(bench: Bench, hot: int) -> bool:
    """Split one whole sequence of `hot` with the coolest ranks of its block, by a degree that levels them."""
    job, block = bench.job, bench.blocks[bench.block_R[hot]]
    others = sorted((r for r in block if r != hot), key=lambda r: (bench.load_R[r], r))
    wholes = [p for _, p in _some(sorted((bench.load[p], p) for p in bench.wholes_R[hot]), 8)]
    best = None
    for g, degree in enumerate(job.degrees[1:], 1):
        if degree > len(block):
            break
        hosts = [hot, *others[: degree - 1]]
        held = sum(bench.load_R[r] for r in hosts)
        for piece in wholes:
            tokens = bench.tokens[piece]
            if tokens < degree:
                continue
            share = -(-tokens // degree)
            fixed, slope = bench.heads[piece] // degree, job.slopes[g]
            total = held - bench.load[piece] + fixed * degree + slope * tokens
            # Even shares may overflow a host; pouring levels them, but for the heads' part.
            reached = max(bench.goal, -(-total // degree), bench.load_R[hosts[-1]] + fixed + slope)
            if bench.goal < reached >= bench.load_R[hot] - (bench.goal >> 10):
                continue
            if any(bench.tokens_R[r] + share > bench.cap for r in hosts[1:]):
                continue
            choice = (reached, tokens * (degree - 1) // degree, piece, g)
            if best is None or choice < best:
                best = choice
    if best is None:
        return False
    reached, _, piece, g = best
    hosts = [hot, *others[: job.degrees[g] - 1]]
    bench.lift(piece)
    bench.split(piece, hosts, g)
    for rank in hosts:
        bench.pour(rank, reached, reached)
    return True


def _level(bench: Bench, hot: int) -> bool:
    """Pour half of what `hot` has beyond its coolest peer: it may have more to offer to other ranks."""
    peers = [bench.host[mate] for piece in bench.shards_R[hot] for mate in bench.mates[piece]]
    cool = min((bench.load_R[r] for r in peers), default=bench.load_R[hot])
    middle = (bench.load_R[hot] + cool) // 2
    return bench.load_R[hot] - middle > bench.goal >> 10 and bench.pour(hot, middle, middle)
