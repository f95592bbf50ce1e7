"""Time of sampling a step's tokens on this machine, microseconds a call, without a model.

    OMP_NUM_THREADS=1 python bench/sampling.py [--vocab 8192 49152] [--rows 1 8 32] [--device cpu]

Logits are shaped as a language model's: a few dozen likely tokens over many unlikely ones. Prints the best of many
calls for each kind of request that a whole batch asks for: greedy, sampled, with top-p, top-k, min-p, penalties, biases
and log-probabilities; ``slots`` is the state's part of each (``SlotTable.sampling_rows``).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from drumline.model.sampling import Sampler
from drumline.model.slots import SlotTable
from drumline.parallel.shards import Range
from drumline.plan.sampling import SlotSampling
from drumline.plan.step import SlotStart, pack

KINDS = {
    "greedy": SlotSampling(),
    "temperature 1": SlotSampling(temperature=1.0, seed=1),
    "top-p 0.95": SlotSampling(temperature=0.8, top_p=0.95, seed=1),
    "top-k 50": SlotSampling(temperature=0.8, top_k=50, seed=1),
    "top-k 50, top-p 0.95": SlotSampling(temperature=0.8, top_k=50, top_p=0.95, seed=1),
    "min-p 0.1": SlotSampling(temperature=0.8, min_p=0.1, seed=1),
    "greedy, presence": SlotSampling(presence_penalty=0.5),
    "greedy, repetition": SlotSampling(repetition_penalty=1.1),
    "greedy, 100 biases": SlotSampling(bias_ids=tuple(range(100)), bias_values=(1.0,) * 100),
    "greedy, 5 logprobs": SlotSampling(logprobs=5),
}


class _Alone:
    """A group of one."""

    size = 1
    rank_in_group = 0


def best(call: Callable[[], object], synchronize: Callable[[], object], seconds: float = 0.3) -> float:
    """Microseconds of the quickest call, of as many as fit into the time, three at least."""
    times, ends = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < ends:
        began = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - began)
    return min(times) * 1e6


def language_like(rows: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Logits with some forty likely tokens."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, vocab_size, generator=generator) * 2
    logits[:, :40] += torch.rand(rows, 40, generator=generator) * 14
    return logits.to(device)


@torch.inference_mode()
def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[8192, 49152])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    device = torch.device(given.device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    print("| vocabulary | rows | " + " | ".join(KINDS) + " | slots |\n|" + " --- |" * (len(KINDS) + 3))
    for vocab_size in given.vocab:
        for rows in given.rows:
            logits = language_like(rows, vocab_size, device)
            ids = Range(0, vocab_size)
            sampler = Sampler([ids], _Alone())  # type: ignore[arg-type]
            slots = np.arange(rows, dtype=np.int32)
            figures = []
            for kind in KINDS.values():
                table = SlotTable(512, 16, ids=ids, device=device)
                for slot in slots.tolist():
                    table.start(SlotStart(slot, "bench", pack(list(range(200))), 100, kind))
                asked = table.sampling_rows(slots)
                figures.append(best(lambda: sampler.sample(logits, asked), wait))  # noqa: B023  called at once
            figures.append(best(lambda: table.sampling_rows(slots), wait))  # noqa: B023
            print(f"| {vocab_size} | {rows} | " + " | ".join(f"{figure:.0f}" for figure in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
