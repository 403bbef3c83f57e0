"""Layouts by name: "none", "elastic", or a bag spec such as "g1n16+g4n4" (16 bags of one rank, 4 of four)."""

import itertools
import re


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def split_degrees(heads: int, ranks: int, domain: int) -> list[int]:
    """Over how many ranks a sequence can be split: Ulysses divides the heads, inside one domain."""
    return [d for d in divisors(heads) if d <= min(ranks, domain)]


def check_layout(layout: str, *, ranks: int, heads: int, domain: int = 8) -> None:
    """ValueError when `layout` cannot run on `ranks` ranks in domains of `domain`, with `heads` heads."""
    for name, value in (("ranks", ranks), ("heads", heads), ("domain", domain)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if layout not in ("none", "elastic"):
        replica_bags(layout, ranks=ranks, heads=heads, domain=domain)


def parse_bags(layout: str) -> list[tuple[int, int]]:
    """(ranks a bag, bags) of each kind, smallest bags first."""
    kinds: dict[int, int] = {}
    for term in layout.split("+"):
        match = re.fullmatch(r"g([1-9]\d*)n([1-9]\d*)", term.strip())
        if not match:
            raise ValueError(
                f"layout {layout!r}: {term!r} is not gXnY (Y bags of X ranks, both at least 1); "
                "use none, elastic, or terms such as g1n16+g4n4"
            )
        size, count = int(match[1]), int(match[2])
        if size in kinds:
            raise ValueError(
                f"layout {layout!r} names bags of {size} twice; write g{size}n{kinds[size] + count}"
            )
        kinds[size] = count
    return sorted(kinds.items())


def replica_bags(layout: str, *, ranks: int, heads: int, domain: int) -> list[list[range]]:
    """The bags of each replica as ranges of ranks, smaller bags on lower ranks.

    A spec of fewer ranks than the job has is repeated; a replica balances the sequences of its own ranks.
    """
    kinds = parse_bags(layout)
    for size, _ in kinds:
        if size > domain:
            raise ValueError(
                f"layout {layout!r}: a bag of {size} ranks is larger than the sequence-parallel domain of "
                f"{domain}; use smaller bags or a wider domain"
            )
        if heads % size:
            raise ValueError(
                f"layout {layout!r}: a bag of {size} ranks cannot split {heads} heads evenly; "
                f"use bags of {divisors(heads)}"
            )
    width = sum(size * count for size, count in kinds)
    if ranks % width:
        raise ValueError(
            f"layout {layout!r} names {width} ranks, which does not divide the {ranks} ranks of the job; "
            "change the spec or the number of ranks"
        )
    sizes = [size for size, count in kinds for _ in range(count)]
    replicas = []
    for first in range(0, ranks, width):
        bags = []
        for size in sizes:
            bags.append(range(first, first + size))
            first += size
        replicas.append(bags)
    for bag in (bag for bags in replicas for bag in bags):
        if bag[0] // domain != bag[-1] // domain:
            raise ValueError(
                f"layout {layout!r}: the bag on ranks {bag[0]} to {bag[-1]} crosses the border of a "
                f"sequence-parallel domain of {domain} ranks; change the spec or the domain"
            )
    return replicas


def bag_layouts(ranks: int, sizes: list[int], domain: int) -> list[str]:
    """All specs of bags of one size, or of two, that fill the ranks with bags inside domains."""

    def inside(begin: int, end: int, size: int) -> bool:
        return (end - begin) % size == 0 and all(
            rank // domain == (rank + size - 1) // domain for rank in range(begin, end, size)
        )

    layouts = [f"g{size}n{ranks // size}" for size in sizes if inside(0, ranks, size)]
    for small, large in itertools.combinations(sizes, 2):
        for border in range(small, ranks, small):
            if inside(0, border, small) and inside(border, ranks, large):
                layouts.append(f"g{small}n{border // small}+g{large}n{(ranks - border) // large}")
    return layouts
