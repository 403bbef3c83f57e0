"""Every attention backend against SDPA, and one packed attention layer timed, on one GPU in under 5 minutes.

    python scripts/gpu_check.py
    python scripts/gpu_check.py --device cpu --small      # dry run: the same code, tiny, without a GPU

First bfloat16 outputs and gradients of each backend are compared with SDPA in float32; twice the error of
SDPA in bfloat16 is allowed. Then, for the workloads of the paper, an elastic plan for 32 ranks is made and
the attention of its busiest rank timed: whole sequences with all heads, split ones with that rank's share.
Exit code 0 if all agree, 1 if a backend is off, 2 without the device.
"""

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from data.codes import PRESETS, synthetic_lengths
from knapformer import Packing, VarlenKernel, WorkloadModel, choose_kernel, plan_routes
from knapformer.kernels import BACKENDS, available

HEADS, SIZE = 24, 128
TOLERANCE = 2.0  # times the error of SDPA in bfloat16
SMALL = {"small": "g3b2i64f1s0,g1b1i256f1s0"}
Work = tuple[Packing, int]  # packed sequences, and with how many heads


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny workloads, to try the script itself")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu_check: there is no CUDA device here; run it on a machine with a GPU, or dry with "
            "--device cpu --small",
            file=sys.stderr,
        )
        return 2
    device = torch.device(args.device)
    print(f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}")
    for name in BACKENDS:
        if name not in available(device):
            print(f"  without {name}: {why_not(name, device)}")
    kernels = [choose_kernel(name, device) for name in available(device)]
    print(f"auto chooses {kernels[0].name}")
    agreed = compare(kernels, device, args.small)
    for mix, code in (SMALL if args.small else PRESETS).items():
        time_mix(kernels, mix, busiest_rank(code, device), 2 if args.small else 10)
    return 0 if agreed else 1


def why_not(name: str, device: torch.device) -> str:
    try:
        return f"{choose_kernel(name, device).name} is there"
    except ValueError as error:
        return str(error).split(": ", 1)[1].split("; available")[0]


def compare(kernels: list[VarlenKernel], device: torch.device, small: bool) -> bool:
    """Prints the relative errors of outputs and gradients; whether all are within the tolerance."""
    lens = [1, 33, 16, 16, 60] if small else [1, 452, 256, 256, 1280, 5000]
    packing = Packing.of(lens, device)
    torch.manual_seed(0)
    exact = [torch.randn(sum(lens), 4, SIZE, device=device).bfloat16().float() for _ in range(4)]
    want = results(choose_kernel("sdpa", device), exact, packing)
    allowed = [TOLERANCE * e for e in errors(choose_kernel("sdpa", device), exact, packing, want)]
    print(f"{'bfloat16, relative error of':28}{'out':>10}{'dq':>10}{'dk':>10}{'dv':>10}")
    agreed = True
    for kernel in kernels:
        found = errors(kernel, exact, packing, want)
        fine = all(e <= most for e, most in zip(found, allowed, strict=True))
        agreed &= fine
        print(f"{kernel.name:28}{''.join(f'{e:10.2e}' for e in found)}  {'ok' if fine else 'TOO FAR OFF'}")
    return agreed


def results(kernel: VarlenKernel, exact: list[Tensor], packing: Packing) -> list[Tensor]:
    *qkv, grad = exact
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = kernel(leaves[0], leaves[1], leaves[2], packing)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def errors(kernel: VarlenKernel, exact: list[Tensor], packing: Packing, want: list[Tensor]) -> list[float]:
    found = results(kernel, [x.bfloat16() for x in exact], packing)
    return [float((f.float() - w).norm() / w.norm()) for f, w in zip(found, want, strict=True)]


def busiest_rank(code: str, device: torch.device) -> list[Work]:
    """What the busiest rank of an elastic plan attends to: whole sequences, then those of each degree."""
    len_S, home_S = synthetic_lengths(code, seed=0)
    cost = WorkloadModel.analytic(HEADS * SIZE)
    plan = plan_routes(len_S, home_S, ranks=home_S.max() + 1, layout="elastic", heads=HEADS, cost=cost)
    here_C = plan.host_C == plan.work_R(cost).argmax()
    degree_C, total_C = plan.degree_C(), plan.total_C()
    return [
        (Packing.of(total_C[here_C & (degree_C == degree)], device), HEADS // int(degree))
        for degree in np.unique(degree_C[here_C])
    ]


def time_mix(kernels: list[VarlenKernel], mix: str, work: list[Work], repeats: int) -> None:
    device = work[0][0].device
    flop = sum(4.0 * SIZE * heads * (packing.len_N**2).sum() for packing, heads in work)
    shares = ", ".join(f"{len(packing.len_N)} with {heads} heads" for packing, heads in work)
    print(f"{mix}: busiest rank attends to {shares}; {flop / 1e12:.3f} TFLOP forward")
    for kernel in kernels:
        packed = [
            torch.randn(
                3, int(p.len_N.sum()), heads, SIZE, device=device, dtype=torch.bfloat16, requires_grad=True
            )
            for p, heads in work
        ]

        def forward(kernel: VarlenKernel = kernel, packed: list[Tensor] = packed) -> list[Tensor]:
            return [kernel(x[0], x[1], x[2], p) for x, (p, _) in zip(packed, work, strict=True)]

        def both(forward: Callable[[], list[Tensor]] = forward) -> None:
            outs = forward()
            torch.autograd.backward(outs, outs)

        for label, run, factor in (("forward", forward, 1.0), ("forward+backward", both, 3.5)):
            seconds = median_seconds(run, repeats, device)
            rate = factor * flop / seconds / 1e12
            print(f"  {kernel.name:8}{label:18}{seconds * 1e3:9.2f} ms{rate:9.2f} TFLOP/s")


def median_seconds(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return float(np.median(times[1:]))  # the first run compiles and warms up


if __name__ == "__main__":
    sys.exit(main())
