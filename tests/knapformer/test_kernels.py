"""Laws of attention over packed sequences."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import profile

from knapformer.kernels import Packing, VarlenKernel, available, choose_kernel

torch.set_num_threads(1)


def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: list[int]) -> torch.Tensor:
    """Attention of each sequence alone, straight from the definition."""
    outs = [q[:0] + k[:0] + v[:0]]
    for a, b, c in zip(q.split(lens), k.split(lens), v.split(lens), strict=True):
        weight = torch.einsum("qhk,lhk->hql", a, b).div(q.shape[-1] ** 0.5).softmax(-1)
        outs.append(torch.einsum("hql,lhk->qhk", weight, c))
    return torch.cat(outs)


def random_qkv(tokens: int, heads: int = 2, size: int = 4, **how) -> list[torch.Tensor]:
    return [torch.randn(tokens, heads, size, requires_grad=True, **how) for _ in range(3)]


@given(st.lists(st.integers(1, 6), max_size=12))
@settings(deadline=None, max_examples=60)
def test_sdpa_attends_within_each_sequence_of_any_lengths(lens):
    kernel, packing = choose_kernel("sdpa", "cpu"), Packing.of(lens, "cpu")
    qkv = random_qkv(sum(lens))
    grad = torch.randn_like(qkv[0])
    got = kernel(*qkv, packing)
    want = one_by_one(*qkv, lens)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    for a, b in zip(torch.autograd.grad(got, qkv, grad), torch.autograd.grad(want, qkv, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lens", [[5] * 7, [5, 3] * 7, [3] * 3 + [5] * 4])
def test_sequences_of_one_length_cost_one_call(lens):
    kernel, packing = choose_kernel("sdpa", "cpu"), Packing.of(lens, "cpu")
    with profile() as trace:
        kernel(*random_qkv(sum(lens)), packing)
    calls = [
        event.count for event in trace.key_averages() if event.key == "aten::scaled_dot_product_attention"
    ]
    assert calls == [len(set(lens))]


def test_no_rows_still_give_every_input_its_empty_gradient():
    qkv = random_qkv(0)
    choose_kernel("auto", "cpu")(*qkv, Packing.of([], "cpu")).sum().backward()
    assert [x.grad.shape for x in qkv] == [(0, 2, 4)] * 3


def test_auto_takes_the_first_backend_that_works_and_says_which():
    assert choose_kernel("auto", "cpu").name == available("cpu")[0] == "sdpa"


def test_a_backend_that_cannot_work_here_is_refused_with_what_can():
    with pytest.raises(
        ValueError, match="kernel 'flash5' is not one of auto, flash4, flash3, flash2, varlen, sdpa"
    ):
        choose_kernel("flash5", "cpu")
    with pytest.raises(
        ValueError, match=r"kernel varlen is not available on cpu: it needs a CUDA device; .*: sdpa"
    ):
        choose_kernel("varlen", "cpu")


def test_queries_keys_and_values_must_be_alike():
    kernel, packing = choose_kernel("sdpa", "cpu"), Packing.of([3], "cpu")
    q, k, v = random_qkv(3)
    with pytest.raises(ValueError, match="repeat grouped keys and values"):
        kernel(q, k[:, :1], v[:, :1], packing)
    with pytest.raises(ValueError, match=r"one dtype, not torch.float32, torch.float32 and torch.bfloat16"):
        kernel(q, k, v.bfloat16(), packing)
    with pytest.raises(ValueError, match=r"varlen computes in float16 or bfloat16, not torch.float32"):
        VarlenKernel("varlen", kernel.attention)(q, k, v, packing)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_the_gpu_check_says_that_there_is_no_gpu_and_runs_dry():
    script = Path(__file__).parents[2] / "scripts" / "gpu_check.py"
    alone = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (alone.returncode, alone.stdout) == (2, "") and "no CUDA device" in alone.stderr
    dry = subprocess.run(
        [sys.executable, script, "--device", "cpu", "--small"], capture_output=True, text=True
    )
    assert dry.returncode == 0 and "auto chooses sdpa" in dry.stdout and "forward+backward" in dry.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["flash4", "flash3", "flash2", "varlen"])
def test_every_backend_equals_sdpa_in_bfloat16(name):
    if name not in available("cuda"):
        pytest.skip(f"{name} is not installed")
    lens = [1, 700, 64, 64, 3000]
    packing = Packing.of(lens, "cuda")
    qkv = random_qkv(sum(lens), 4, 128, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(qkv[0])
    got, want = (choose_kernel(backend, "cuda")(*qkv, packing) for backend in (name, "sdpa"))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    for a, b in zip(torch.autograd.grad(got, qkv, grad), torch.autograd.grad(want, qkv, grad), strict=True):
        assert F.mse_loss(a.float(), b.float()) < 1e-3 * b.float().square().mean()
