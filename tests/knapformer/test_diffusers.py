"""The example of docs/library.md, run as it stands there: a transformer that is not ours, balanced."""

import re
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from knapformer import Balancer, WorkloadModel
from tests.spawn import spawn

DOCS = Path(__file__).parents[2] / "docs" / "library.md"
TEXT = 3


def example() -> SimpleNamespace:
    (code,) = re.findall(r"```python\n# example: balanced_flux\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict = {"__name__": "balanced_flux"}
    exec(compile(code, str(DOCS), "exec", dont_inherit=True), names)
    return SimpleNamespace(**names)


def tiny_flux(docs: SimpleNamespace) -> torch.nn.Module:
    torch.manual_seed(0)
    return docs.FluxTransformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=12,
        num_attention_heads=4,
        joint_attention_dim=10,
        pooled_projection_dim=6,
        axes_dims_rope=(4, 4, 4),
    )


def picture(docs: SimpleNamespace, height: int, width: int):
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    ids = torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1).float()
    return docs.Sample(
        torch.randn(height * width, 8), ids, torch.randn(TEXT, 10), torch.randn(6), torch.rand(())
    )


def balanced_flux_is_the_flux_of_each_picture_alone(group):
    docs, rank = example(), dist.get_rank(group)
    torch.manual_seed(1)
    of_rank = [[picture(docs, *size) for size in sizes] for sizes in ([(6, 9), (2, 3), (5, 5)], [(1, 2)])]
    want = tiny_flux(docs)
    alone = [
        want(
            s.latents[None], s.text[None], s.pooled[None], s.timestep[None], s.image_ids, torch.zeros(TEXT, 3)
        ).sample[0]
        for samples in of_rank
        for s in samples
    ]
    sum(v.square().sum() for v in alone).backward()
    mine = alone[:3] if rank == 0 else alone[3:]

    for layout in ("none", "g1n2", "g2n1", "elastic"):
        flux = tiny_flux(docs)
        balancer = Balancer(group, heads=4, cost=WorkloadModel.analytic(48), device="cpu", layout=layout)
        got = docs.BalancedFlux(flux, balancer, TEXT)(of_rank[rank])
        sum(v.square().sum() for v in got).backward()
        torch.testing.assert_close(got, mine, rtol=1e-4, atol=1e-5)
        for a, b in zip(flux.parameters(), want.parameters(), strict=True):
            dist.all_reduce(a.grad, group=group)
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_a_transformer_that_is_not_ours_is_the_same_when_balanced():
    spawn([balanced_flux_is_the_flux_of_each_picture_alone], ranks=2)
