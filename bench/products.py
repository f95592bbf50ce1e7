"""Matrix products of one thread over cold weights: compiled panels, ``F.linear`` and FBGEMM's float16 kernel.

    OMP_NUM_THREADS=1 python bench/products.py [--rows 1 2 4 8 16 32 64 256] [--shapes tiny default] [--mb 64]

Each shape has as many matrices as ``--mb`` holds and takes them in turn, so that weights come from the last cache or
from memory, as in a real step. The time is the median over the matrices of the best of several rounds, without what a
call from Python costs (a step's program calls products from compiled code).
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch.nn import functional

from drumline.model.kernels.products import Panels, product_once, scratch_floats

SHAPES = {
    "tiny": (torch.float32, [(512, 256), (256, 256), (1376, 256), (256, 688), (8192, 256)]),
    "default": (torch.bfloat16, [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)]),
}
"""Type that the weights fit exactly, and [N, K]: queries, keys and values; output; gate and up; down; head."""


def seconds(call: Callable[[int], object], count: int, rounds: int) -> float:
    """The median over ``count`` matrices of the best of ``rounds``."""
    best = [float("inf")] * count
    for _ in range(rounds):
        for number in range(count):
            start = time.perf_counter()
            call(number)
            best[number] = min(best[number], time.perf_counter() - start)
    return statistics.median(best)


def panels_call(panels: list[Panels], x: torch.Tensor) -> Callable[[int], object]:
    first = panels[0]
    out = torch.empty(len(x), first.features)
    scratch = torch.empty(scratch_floats(len(x), first.inputs))

    def call(number: int) -> torch.Tensor:
        weights = panels[number]
        product_once(
            x.data_ptr(),
            x.stride(0),
            len(x),
            weights.address,
            weights.kind,
            weights.features,
            weights.inputs,
            out.data_ptr(),
            out.stride(0),
            0,
            scratch.data_ptr(),
        )
        return out

    return call


def linear_call(weights: list[torch.Tensor], x: torch.Tensor) -> Callable[[int], object]:
    return lambda number: functional.linear(x, weights[number])


def fbgemm_call(packed: list[torch.Tensor], x: torch.Tensor) -> Callable[[int], object]:
    return lambda number: torch.fbgemm_linear_fp16_weight_fp32_activation(x, packed[number], None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 256])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--work", type=float, default=0.2, help="seconds for each figure, about")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # FBGEMM's functions are marked as deprecated
    torch.set_num_threads(1)
    overhead = seconds(panels_call([Panels(torch.zeros(1, 1))], torch.zeros(1, 1)), 1, 3000)
    print(f"a call from Python: {overhead * 1e6:.2f} us")
    print(f"{'N x K':>14} {'rows':>5} {'panels':>10} {'':>20} {'F.linear':>10} {'FBGEMM':>10}   us")
    for name in args.shapes:
        dtype, shapes = SHAPES[name]
        for features, inputs in shapes:
            count = max(2, (args.mb << 20) // (features * inputs * 4))
            weights = [torch.randn(features, inputs).to(dtype).float() for _ in range(count)]
            panels = [Panels(weight) for weight in weights]
            packed = [torch.fbgemm_pack_gemm_matrix_fp16(weight) for weight in weights] if dtype.itemsize == 2 else []
            for rows in args.rows:
                x = torch.randn(rows, inputs)
                calls = [panels_call(panels, x), linear_call(weights, x)]
                if packed:
                    calls.append(fbgemm_call(packed, x))
                flops = 2 * rows * features * inputs
                rounds = max(4, int(args.work / count / (flops / 1.5e11 + features * inputs * 4 / 2e10)))
                times = [seconds(call, count, rounds) for call in calls]
                times[0] -= overhead
                rates = f"{flops / times[0] / 1e9:.0f} GFLOPS {panels[0].nbytes / times[0] / 1e9:.1f} GB/s"
                others = " ".join(f"{1e6 * t:10.1f}" for t in times[1:])
                print(f"{features:6} x {inputs:5} {rows:5} {1e6 * times[0]:10.1f} {rates:>20} {others}", flush=True)


if __name__ == "__main__":
    main()
