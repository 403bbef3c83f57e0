"""A length code says how many sequences each rank has, and about how long they are."""

import numpy as np
import pytest

from data.codes import PRESETS, parse_codes, repeated_lengths, synthetic_lengths


def test_a_code_fixes_ranks_samples_and_the_range_of_lengths() -> None:
    len_S, home_S = synthetic_lengths("g2b3i256f1s0,g1b2i512f4s0,g1b1i256f85s1", seed=0)
    assert home_S.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3]
    assert len_S.dtype == home_S.dtype == np.int64
    for length, visual in zip(len_S.tolist(), [256] * 6 + [4096] * 2 + [256 * 25], strict=True):
        assert 0.96 * visual - 1 <= length <= 1.04 * visual + 392 + 1


@pytest.mark.parametrize(
    ("name", "sequences"), [("paper_lowres", 1024), ("paper_mixres", 112), ("paper_joint", 89)]
)
def test_the_papers_workloads_have_32_ranks(name: str, sequences: int) -> None:
    len_S, home_S = synthetic_lengths(name, seed=3)
    assert len(len_S) == sequences and sorted(set(home_S.tolist())) == list(range(32))
    assert all(
        (a == b).all() for a, b in zip(synthetic_lengths(PRESETS[name], 3), (len_S, home_S), strict=True)
    )
    assert (synthetic_lengths(name, 4)[0] != len_S).any()


@pytest.mark.parametrize("code", ["", "g1", "g1b1i256f1s2", "paper"])
def test_a_code_that_does_not_parse_is_named(code: str) -> None:
    with pytest.raises(ValueError, match="no length code"):
        synthetic_lengths(code, 0)


def test_a_larger_job_is_several_of_the_codes_own_with_draws_of_their_own() -> None:
    code = "g2b3i256f1s0,g1b2i512f4s0"
    len_S, home_S, part_S = repeated_lengths(code, 9, seed=5)
    assert home_S.tolist() == [h + 3 * i for i in range(3) for h in [0, 0, 0, 1, 1, 1, 2, 2]]
    assert part_S.tolist() == [0] * 6 + [1] * 2 + [0] * 6 + [1] * 2 + [0] * 6 + [1] * 2
    assert len(set(len_S[part_S == 0])) > 6
    for a, b in zip(repeated_lengths(code, 3, seed=5), synthetic_lengths(code, 5), strict=False):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="is for 3 ranks, which do not divide the job's 8"):
        repeated_lengths(code, 8, seed=5)


@pytest.mark.parametrize("code", ["g0b1i256f1s0", "g1b0i256f1s0", "g1b1i8f1s0", "g1b1i256f0s0"])
def test_a_part_without_tokens_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match="has no tokens"):
        parse_codes(f"g1b1i256f1s0,{code}")


def test_more_sequences_than_anyone_trains_on_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has 999,999,998,000,000,001 sequences"):
        parse_codes("g999999999b999999999i256f1s0")
