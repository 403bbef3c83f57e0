"""Attention over packed sequences of any lengths: full within each sequence, none between them.

N sequences, T tokens of all of them, H heads, K head size, L tokens of one sequence.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Packing:
    """Lengths of the packed sequences, prepared once per step, so that no layer waits for the device."""

    len_N: np.ndarray
    device: torch.device
    cu_N1: Tensor
    """[N + 1] int32 on the device: where each sequence begins, and T."""
    longest: int

    @classmethod
    def of(cls, len_N: Sequence[int] | np.ndarray, device: torch.device | str) -> "Packing":
        """The packing of sequences of these lengths (tokens) on a device."""
        len_N = np.asarray(len_N, np.int64)
        cu_N1 = torch.from_numpy(np.concatenate([[0], np.cumsum(len_N)]).astype(np.int32))
        return cls(len_N, torch.device(device), cu_N1.to(device), int(len_N.max(initial=0)))

    @cached_property
    def regrouping(self) -> tuple[np.ndarray, Tensor, Tensor] | None:
        """Sorted len_N, the [T] rows so ordered, the way back; None if equal lengths already are neighbours.

        Only SDPA wants it, so it is made at its first use.
        """
        n_runs = np.count_nonzero(np.diff(self.len_N, prepend=-1))
        if n_runs == len(np.unique(self.len_N)):
            return None
        order_N = np.argsort(self.len_N, kind="stable")
        len_N = self.len_N[order_N]
        first_N = (np.cumsum(self.len_N) - self.len_N)[order_N]
        row_T = np.repeat(first_N - (np.cumsum(len_N) - len_N), len_N) + np.arange(len_N.sum())
        back_T = np.argsort(row_T)
        return len_N, torch.from_numpy(row_T).to(self.device), torch.from_numpy(back_T).to(self.device)


Attention = Callable[[Tensor, Tensor, Tensor, Packing], Tensor]


@dataclass(frozen=True)
class VarlenKernel:
    """A backend, bidirectional, scale 1/sqrt(K): `kernel(q_THK, k_THK, v_THK, packing) -> out_THK`."""

    name: str
    attention: Attention

    def __call__(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, packing: Packing) -> Tensor:
        """Attend within each packed sequence; zero rows are allowed. Raises ValueError like `check`."""
        self.check(q_THK, k_THK, v_THK)
        if len(q_THK) == 0:
            return (
                q_THK + k_THK + v_THK
            )  # no rows, yet in the graph of all three: each gets its empty gradient
        return self.attention(q_THK, k_THK, v_THK, packing)

    def check(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor) -> None:
        """Raises ValueError if the three differ in shape or dtype, or the backend does not know the dtype."""
        if not q_THK.shape == k_THK.shape == v_THK.shape:
            raise ValueError(
                f"queries, keys and values must have one shape [tokens, heads, head size], not "
                f"{tuple(q_THK.shape)}, {tuple(k_THK.shape)} and {tuple(v_THK.shape)}; "
                f"repeat grouped keys and values for all heads"
            )
        if not q_THK.dtype == k_THK.dtype == v_THK.dtype:
            raise ValueError(
                f"queries, keys and values must have one dtype, "
                f"not {q_THK.dtype}, {k_THK.dtype} and {v_THK.dtype}"
            )
        if self.name != "sdpa" and q_THK.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"kernel {self.name} computes in float16 or bfloat16, not {q_THK.dtype}; "
                f"cast q, k and v or choose kernel sdpa"
            )


def choose_kernel(name: str, device: torch.device | str) -> VarlenKernel:
    """The named backend, or for "auto" the first that works on the device; `.name` says which.

    Declared order: flash4, flash3, flash2, varlen, sdpa. Raises ValueError if the named one cannot work here.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"kernel {name!r} is not one of auto, {', '.join(BACKENDS)}")
    device = torch.device(device)
    why_not = {}
    for backend in BACKENDS if name == "auto" else [name]:
        try:
            return VarlenKernel(backend, BACKENDS[backend](device))
        except _Unavailable as reason:
            why_not[backend] = reason
    raise ValueError(
        f"kernel {name} is not available on {device}: {why_not[name]}; "
        f"available: {', '.join(available(device))}"
    )


def available(device: torch.device | str) -> list[str]:
    """Names of the backends that work on the device, in the order in which "auto" tries them."""
    names = []
    for name, load in BACKENDS.items():
        try:
            load(torch.device(device))
        except _Unavailable:
            continue
        names.append(name)
    return names


class _Unavailable(Exception):
    """Why a backend does not work here."""


def _need_cuda(device: torch.device, generation: range) -> None:
    if device.type != "cuda":
        raise _Unavailable("it needs a CUDA device")
    major, minor = torch.cuda.get_device_capability(device)
    if major not in generation:
        raise _Unavailable(
            f"it is for compute capability {generation[0]}.x to {generation[-1]}.x, not {major}.{minor}"
        )


def _flash(module: str, package: str, generation: range) -> Callable[[torch.device], Attention]:
    """The loader of one generation of flash-attn (Dao, arXiv 2307.08691; Shah et al., arXiv 2407.08608)."""

    def load(device: torch.device) -> Attention:
        _need_cuda(device, generation)
        try:
            varlen = importlib.import_module(module).flash_attn_varlen_func
        except Exception as error:  # a build for another torch fails with whatever its loader raises
            raise _Unavailable(f"{package} does not import ({error})") from error

        def attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, packing: Packing) -> Tensor:
            out = varlen(
                q_THK,
                k_THK,
                v_THK,
                cu_seqlens_q=packing.cu_N1,
                cu_seqlens_k=packing.cu_N1,
                max_seqlen_q=packing.longest,
                max_seqlen_k=packing.longest,
            )
            return out[0] if isinstance(out, tuple) else out  # some versions add the log-sum-exp

        return attend

    return load


def _load_torch_varlen(device: torch.device) -> Attention:
    _need_cuda(device, range(8, 13))
    from torch.nn.attention.varlen import varlen_attn

    def attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, packing: Packing) -> Tensor:
        out = varlen_attn(q_THK, k_THK, v_THK, packing.cu_N1, packing.cu_N1, packing.longest, packing.longest)
        assert isinstance(out, Tensor)
        return out

    return attend


def _load_sdpa(device: torch.device) -> Attention:
    return _sdpa


def _sdpa(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, packing: Packing) -> Tensor:
    """One call per length, so many pictures of one size cost one call."""
    if packing.regrouping is None:
        return _sdpa_runs(q_THK, k_THK, v_THK, packing.len_N)
    len_N, row_T, back_T = packing.regrouping
    q, k, v = (_Permute.apply(x, row_T, back_T) for x in (q_THK, k_THK, v_THK))
    return _Permute.apply(_sdpa_runs(q, k, v, len_N), back_T, row_T)


def _sdpa_runs(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, len_N: np.ndarray) -> Tensor:
    first_P = np.flatnonzero(np.diff(len_N, prepend=-1))
    n_P = np.diff(first_P, append=len(len_N))
    rows_P = (len_N[first_P] * n_P).tolist()
    outs = []
    for n, *qkv in zip(
        n_P.tolist(), q_THK.split(rows_P), k_THK.split(rows_P), v_THK.split(rows_P), strict=True
    ):
        q, k, v = (x.unflatten(0, (n, -1)).transpose(1, 2) for x in qkv)  # [n, H, L, K]
        outs.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)


class _Permute(torch.autograd.Function):
    """x[row_T] with gradient g[back_T]: a gather both ways, where autograd's own would add row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row_T: Tensor, back_T: Tensor) -> Tensor:
        ctx.back_T = back_T
        return x.index_select(0, row_T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.back_T), None, None


BACKENDS: dict[str, Callable[[torch.device], Attention]] = {
    "flash4": _flash("flash_attn.cute", "flash-attn-4", range(10, 12)),
    "flash3": _flash("flash_attn_interface", "flash-attn-3", range(9, 10)),
    "flash2": _flash("flash_attn", "flash-attn", range(8, 13)),
    "varlen": _load_torch_varlen,
    "sdpa": _load_sdpa,
}
