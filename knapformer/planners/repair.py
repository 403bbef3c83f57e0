"""The elastic planner's repairs: from the hottest rank, take what its step is too long for.

Each repair lowers the hottest of the ranks that it touches, so that they end.
"""

from bisect import bisect_left

from knapformer.planners.bench import Bench


def even_ranks(bench: Bench, steps: int) -> None:
    """Cool the hottest rank, again and again, until all are at the goal or cannot be helped."""
    heat_R = list(bench.load_R)
    for _ in range(steps):
        worst = max(heat_R)
        if worst <= bench.goal:
            return
        hot = heat_R.index(worst)
        if cool_rank(bench, hot):
            # Ranks given up before may be helped by what has just moved in their block.
            for rank in bench.blocks[bench.block_R[hot]]:
                heat_R[rank] = bench.load_R[rank]
            heat_R = [h if h < 0 else load for h, load in zip(heat_R, bench.load_R, strict=True)]
        else:
            heat_R[hot] = -1


def hedge(bench: Bench, steps: int) -> None:
    """Spread long attention until the plan stays even if the cost model errs about it by a quarter."""
    given_up = set()
    for _ in range(steps):
        hot, excess = -1, 0
        for rank, (load, heads) in enumerate(zip(bench.load_R, bench.heads_R, strict=True)):
            e = bench.excess(load, heads)
            if e > excess and rank not in given_up:
                hot, excess = rank, e
        if hot < 0:
            return
        if bench.load_R[hot] - bench.goal == excess:
            if cool_rank(bench, hot):
                given_up.clear()
            else:
                given_up.add(hot)
            continue
        if bench.load_R[hot] + bench.heads_R[hot] // 3 - bench.goal_up == excess:
            if bench.pour(hot, bench.load_R[hot] - excess, bench.goal):
                continue
            order = sorted(range(len(bench.load_R)), key=lambda r: (bench.load_R[r] + bench.heads_R[r] // 3, r))
        else:
            order = sorted(range(len(bench.load_R)), key=lambda r: (-bench.heads_R[r], r))
        block = bench.block_R[hot]
        near = [r for r in order if bench.block_R[r] == block]
        for cool in dict.fromkeys([*near[:8], *order[:8]]):
            if cool != hot and hedge_swap(bench, hot, cool, excess):
                given_up.clear()
                break
        else:
            given_up.add(hot)


def hedge_swap(bench: Bench, hot: int, cool: int, excess: int) -> bool:
    least, most = bench.load_R[hot] - bench.goal, bench.goal - bench.load_R[cool]
    gives = sorted((bench.load[p], p) for p in bench.pieces_R[hot] if bench.may_go(p, cool))
    takes = sorted((bench.load[p], p) for p in bench.pieces_R[cool] if bench.may_go(p, hot))
    best = None
    for go, back in (*_pairs(gives, takes, least, most), *_sets(gives, takes, least, most)):
        change = sum(bench.load[p] for p in go) - sum(bench.load[p] for p in back)
        heads = sum(bench.heads[p] for p in go) - sum(bench.heads[p] for p in back)
        after = max(
            bench.excess(bench.load_R[hot] - change, bench.heads_R[hot] - heads),
            bench.excess(bench.load_R[cool] + change, bench.heads_R[cool] + heads),
            0,
        )
        if (after and after >= excess - (bench.goal >> 10)) or (best and after > best[0]):
            continue
        if not _fits(bench, go, back, hot, cool):
            continue
        choice = (after, _strays(bench, go, hot, cool) + _strays(bench, back, cool, hot), go, back)
        if best is None or choice < best:
            best = choice
    if best is None:
        return False
    for piece in best[2]:
        bench.move(piece, cool)
    for piece in best[3]:
        bench.move(piece, hot)
    return True


def cool_rank(bench: Bench, hot: int) -> bool:
    """The cheapest repair that helps: pour tokens, swap pieces, split a whole sequence, level with peers."""
    if bench.pour(hot, bench.goal, bench.goal):
        return True
    block = bench.blocks[bench.block_R[hot]]
    near = min((r for r in block if r != hot), key=bench.load_R.__getitem__, default=hot)
    far = bench.load_R.index(min(bench.load_R))
    for cool in dict.fromkeys([near, far] if bench.load_R[near] < bench.goal else [far, near]):
        if cool != hot and swap(bench, hot, cool):
            return True
    return divide(bench, hot) or level(bench, hot)


def swap(bench: Bench, hot: int, cool: int) -> bool:
    """Exchange pieces so that the worse of both ranks gets best; among equals the fewest tokens leave home."""
    least, most = bench.load_R[hot] - bench.goal, bench.goal - bench.load_R[cool]
    gives = sorted((bench.load[p], p) for p in bench.pieces_R[hot] if bench.may_go(p, cool))
    takes = sorted((bench.load[p], p) for p in bench.pieces_R[cool] if bench.may_go(p, hot))
    best = None
    for go, back in (*_pairs(gives, takes, least, most), *_sets(gives, takes, least, most)):
        change = sum(bench.load[p] for p in go) - sum(bench.load[p] for p in back)
        excess = max(least - change, change - most, 0)
        # A crawl of tiny gains would take long and change nothing.
        if (excess and excess >= least - (bench.goal >> 10)) or (best and excess > best[0]):
            continue
        if not _fits(bench, go, back, hot, cool):
            continue
        choice = (excess, _strays(bench, go, hot, cool) + _strays(bench, back, cool, hot), go, back)
        if best is None or choice < best:
            best = choice
    if best is None:
        return False
    for piece in best[2]:
        bench.move(piece, cool)
    for piece in best[3]:
        bench.move(piece, hot)
    return True


Pieces = list[tuple[int, int]]


def _pairs(gives: Pieces, takes: Pieces, least: int, most: int) -> list[tuple[list[int], list[int]]]:
    """Each piece alone, and against the one that brings the change nearest to the middle of [least, most]."""
    aim = (least + most) // 2
    options: list[tuple[list[int], list[int]]] = []
    for load, piece in gives:
        options.append(([piece], []))
        at = bisect_left(takes, (load - aim, -1))
        options += [([piece], [p]) for _, p in takes[max(at - 1, 0) : at + 1]]
    return options


def _sets(gives: Pieces, takes: Pieces, least: int, most: int) -> list[tuple[list[int], list[int]]]:
    """Each piece of one rank against as many of the other, largest first, as the change wants."""
    aim = least if least <= most else (least + most) // 2
    options = [([piece], _filling(takes, load - aim)) for load, piece in gives]
    aim = most if least <= most else aim
    options += [(_filling(gives, load + aim), [piece]) for load, piece in takes]
    return options


def _filling(pieces: Pieces, room: int) -> list[int]:
    chosen = []
    for load, piece in reversed(pieces):
        if load <= room:
            room -= load
            chosen.append(piece)
    return chosen


def _fits(bench: Bench, go: list[int], back: list[int], hot: int, cool: int) -> bool:
    """Tokens stay under the cap, and no two shards of a sequence meet."""
    grown = sum(bench.tokens[p] for p in go) - sum(bench.tokens[p] for p in back)
    if bench.tokens_R[cool] + grown > bench.cap or bench.tokens_R[hot] - grown > bench.cap:
        return False
    shards = [bench.seq[p] for p in (*go, *back) if bench.mates[p]]
    return len(shards) == len(set(shards))


def _strays(bench: Bench, pieces: list[int], here: int, there: int) -> int:
    """Tokens away from home after the step less those before."""
    return sum(bench.tokens[p] * ((there != bench.home[p]) - (here != bench.home[p])) for p in pieces)


def divide(bench: Bench, hot: int) -> bool:
    """Split one whole sequence of `hot` with the coolest ranks of its block, by the least degree that levels."""
    job, block = bench.job, bench.blocks[bench.block_R[hot]]
    others = sorted((r for r in block if r != hot), key=lambda r: (bench.load_R[r], r))
    best = None
    for g, degree in enumerate(job.degrees[1:], 1):
        if degree > len(block):
            break
        hosts = [hot, *others[: degree - 1]]
        held = sum(bench.load_R[r] for r in hosts)
        for piece in bench.pieces_R[hot]:
            tokens = bench.tokens[piece]
            if bench.mates[piece] or tokens < degree:
                continue
            share = -(-tokens // degree)
            fixed, slope = int(job.fixed_SG[piece, g]), int(job.slope_G[g])
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


def level(bench: Bench, hot: int) -> bool:
    """Pour half of what `hot` has beyond its coolest peer: it may have more to offer to other ranks."""
    peers = [bench.host[mate] for piece in bench.pieces_R[hot] for mate in bench.mates[piece]]
    cool = min((bench.load_R[r] for r in peers), default=bench.load_R[hot])
    middle = (bench.load_R[hot] + cool) // 2
    return bench.load_R[hot] - middle > bench.goal >> 10 and bench.pour(hot, middle, middle)
