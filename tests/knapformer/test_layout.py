"""Layout names: what they mean, and what is refused in words."""

import pytest

from knapformer import check_layout
from knapformer.layout import bag_layouts, divisors, parse_bags, replica_bags, split_degrees


def test_smaller_bags_take_lower_ranks_whatever_the_order_of_the_spec():
    assert replica_bags("g2n1+g1n2", ranks=4, heads=4, domain=8) == [[range(0, 1), range(1, 2), range(2, 4)]]


def test_a_spec_of_fewer_ranks_is_repeated():
    assert replica_bags("g2n1", ranks=6, heads=4, domain=8) == [[range(r, r + 2)] for r in (0, 2, 4)]


def test_degrees_divide_the_heads_inside_a_domain():
    assert divisors(24) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert split_degrees(24, ranks=32, domain=8) == [1, 2, 3, 4, 6, 8]
    assert split_degrees(24, ranks=5, domain=8) == [1, 2, 3, 4]
    assert split_degrees(7, ranks=5, domain=8) == [1]


def test_bag_layouts_are_all_that_a_job_accepts():
    assert bag_layouts(4, [1, 2, 4], 8) == ["g1n4", "g2n2", "g4n1", "g1n2+g2n1"]
    for ranks, domain in ((12, 8), (13, 4), (24, 8)):
        layouts = bag_layouts(ranks, [1, 2, 3, 4], domain)
        assert layouts and len(set(layouts)) == len(layouts)
        for layout in layouts:
            check_layout(layout, ranks=ranks, heads=12, domain=domain)


def test_spaces_around_terms_are_harmless():
    assert parse_bags("g1n16 + g4n4") == [(1, 16), (4, 4)]


@pytest.mark.parametrize("layout", ["none", "elastic", "g1n4", "g2n2", "g1n2+g2n1", "g4n1"])
def test_layouts_that_fit_are_accepted(layout):
    check_layout(layout, ranks=4, heads=24, domain=8)


@pytest.mark.parametrize(
    ("layout", "ranks", "heads", "domain", "said"),
    [
        ("g1", 4, 4, 8, "'g1' is not gXnY"),
        ("", 4, 4, 8, "'' is not gXnY"),
        ("g0n4", 4, 4, 8, "'g0n4' is not gXnY"),
        ("g1n2,g2n1", 4, 4, 8, "is not gXnY"),
        ("g1n2+", 4, 4, 8, "'' is not gXnY"),
        ("static", 4, 4, 8, "use none, elastic"),
        ("g1n2+g1n2", 4, 4, 8, "write g1n4"),
        ("g8n1", 8, 8, 4, "larger than the sequence-parallel domain of 4"),
        ("g8n1", 8, 24, 0, "domain=0 must be at least 1"),
        ("g4n1", 4, 6, 8, r"use bags of \[1, 2, 3, 6\]"),
        ("g1n3", 4, 4, 8, "names 3 ranks, which does not divide the 4 ranks"),
        ("g1n1+g2n1", 12, 4, 8, "the bag on ranks 7 to 8 crosses"),
    ],
)
def test_layouts_that_cannot_run_are_refused_in_words(layout, ranks, heads, domain, said):
    with pytest.raises(ValueError, match=said):
        check_layout(layout, ranks=ranks, heads=heads, domain=domain)
