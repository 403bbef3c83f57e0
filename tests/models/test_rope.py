"""Laws of rotary positions."""

import torch

from models.rope import rotary_table, rotate

AXES = (4, 6, 6)


def products(positions: torch.Tensor) -> torch.Tensor:
    """[T, T] dot products of one query and one key placed everywhere."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 16).expand(2, len(positions), 1, 16)
    table = rotary_table(positions, AXES, 100.0)
    return rotate(q, table)[:, 0] @ rotate(k, table)[:, 0].T


def test_attention_sees_only_differences_of_positions():
    positions = torch.randint(0, 50, (20, 3))
    moved = positions + torch.tensor([7, 300, 11])
    torch.testing.assert_close(products(moved), products(positions), rtol=1e-4, atol=1e-4)
    assert products(positions).std() > 0.1


def test_each_axis_turns_its_own_part_of_the_head():
    x = torch.ones(1, 1, 16)
    for axis, (begin, end) in enumerate(((0, 4), (4, 10), (10, 16))):
        position = torch.zeros(1, 3, dtype=torch.int64)
        position[0, axis] = 3
        changed = (rotate(x, rotary_table(position, AXES, 100.0)) != x)[0, 0].nonzero()[:, 0]
        assert changed.tolist() == list(range(begin, end))


def test_a_rotation_keeps_lengths_and_dtype_and_position_zero_is_none():
    x = torch.randn(5, 2, 16)
    table = rotary_table(torch.randint(0, 9999, (5, 3)), AXES, 10000.0)
    torch.testing.assert_close(rotate(x, table).norm(dim=-1), x.norm(dim=-1))
    assert rotate(x.bfloat16(), table).dtype == torch.bfloat16
    assert torch.equal(rotate(x, rotary_table(torch.zeros(5, 3), AXES, 10000.0)), x)
