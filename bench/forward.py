"""Time of one decode step, in one run: drumline's runner with its compiled and lean forwards and with transformers'
modules, and transformers by itself with a static cache.

    OMP_NUM_THREADS=1 python bench/forward.py FOLDER... [--rows 1 8 32] [--context 200] [--systems compiled lean]

Prints the best and the median time in ms of a step and the ratios to transformers. A step of ours is a whole plan: slot
state, attention over the paged cache, forward, greedy sampling. Systems take turns, several times; the best of many
steps is what a busy machine disturbs least. ``--profile`` shows where a step goes instead.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, StaticCache

from drumline.model.attention import KVCache
from drumline.model.compiled import CompiledForward
from drumline.model.forward import Forward, ModuleForward
from drumline.model.lean import LeanForward
from drumline.model.loader import load_model
from drumline.model.runner import ModelRunner
from drumline.model.sampling import Sampler
from drumline.model.spec import read_spec
from drumline.parallel.groups import GroupCoordinator, init_groups
from drumline.parallel.layout import Layout
from drumline.parallel.shards import Range
from drumline.plan.sampling import SlotSampling
from drumline.plan.step import BY_VALUE, SlotStart, StepPlan, ints, pack

CPU = torch.device("cpu")
BLOCK = 16
LONGEST = 2048


class Ours:
    """Slots of one runner that decode together."""

    def __init__(self, folder: Path, group: GroupCoordinator, kind: str, most_rows: int) -> None:
        spec = read_spec(folder)
        model = load_model(spec, folder, dtype=torch.float32, device=CPU, group=group)
        forward: Forward
        if kind == "compiled":
            forward = CompiledForward(model, LONGEST)
        else:
            forward = LeanForward(model, LONGEST) if kind == "lean" else ModuleForward(model)
        if isinstance(forward, LeanForward) and forward.laying_out is not None:
            forward.laying_out.join()
        self.runner = ModelRunner(
            forward,
            Sampler((Range(0, spec.vocab_size),), group),
            num_kv_heads=spec.num_kv_heads,
            max_model_len=LONGEST,
            device=CPU,
        )
        self.cache = KVCache(
            num_layers=spec.num_layers,
            num_blocks=most_rows * LONGEST // BLOCK,
            num_kv_heads=spec.num_kv_heads,
            block_size=BLOCK,
            head_dim=spec.head_dim,
            dtype=torch.float32,
            device=CPU,
        )

    def start(self, rows: int, context: int) -> None:
        """Prompts of ``context`` tokens for so many slots."""
        self.runner.set_cache(self.cache)
        self.slots = np.arange(rows, dtype=np.int32)
        self.length, self.blocks = context, context // BLOCK + 1
        rng = np.random.default_rng(0)
        self.free = rng.permutation(self.cache.num_blocks).astype(np.int32).tolist()
        for slot in self.slots.tolist():
            start = SlotStart(slot, str(slot), pack(rng.integers(3, 500, context).tolist()), context, SlotSampling())
            plan = StepPlan(
                step=-2 - slot,
                starts=[start],
                slots=pack([slot]),
                num_tokens=pack([context]),
                num_computed=pack([0]),
                token_source=pack([BY_VALUE]),
                block_counts=pack([self.blocks]),
                blocks=pack([self.free.pop() for _ in range(self.blocks)]),
                sample=pack([1]),
            )
            self.runner.execute(plan)
        self.number = 0

    def step(self) -> None:
        """One token for each slot."""
        more = 1 if self.length >= self.blocks * BLOCK else 0
        self.blocks += more
        rows = len(self.slots)
        source = [-2 - slot for slot in self.slots.tolist()] if not self.number else [self.number] * rows
        plan = StepPlan(
            step=self.number + 1,
            slots=pack(self.slots),
            num_tokens=pack([1] * rows),
            num_computed=pack([self.length] * rows),
            token_source=pack(source),
            block_counts=pack([more] * rows),
            blocks=pack([self.free.pop() for _ in range(more * rows)]),
            sample=pack([1] * rows),
        )
        output = self.runner.execute(plan)
        assert output is not None
        assert len(ints(output.tokens)) == rows
        self.length += 1
        self.number += 1


class Theirs:
    """transformers with a static cache, as its ``generate()`` runs it, without the loop around."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def start(self, rows: int, context: int) -> None:
        """Prompts of ``context`` tokens for so many sequences."""
        self.cache = StaticCache(self.model.config, max_cache_len=context + 256)
        ids = torch.randint(3, 500, (rows, context))
        self.ids = self.model(ids, past_key_values=self.cache, logits_to_keep=1).logits[:, -1:].argmax(-1)

    @torch.inference_mode()
    def step(self) -> None:
        """One token for each sequence."""
        self.ids = self.model(self.ids, past_key_values=self.cache, logits_to_keep=1).logits[:, -1:].argmax(-1)


def timed(step: Callable[[], None], seconds: float) -> list[float]:
    """Seconds of each step, for about so long."""
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < 3 or (len(taken) < 200 and time.perf_counter() < end):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return taken


def compare(folder: Path, group: GroupCoordinator, args: argparse.Namespace) -> None:
    most = max(args.rows)
    systems: dict[str, Ours | Theirs] = {}
    for name in args.systems:
        systems[name] = Theirs(folder) if name == "transformers" else Ours(folder, group, name, most)
    for rows in args.rows:
        taken: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(args.rounds):
            for name, system in systems.items():
                system.start(rows, args.context)
                timed(system.step, 0.0)
                if args.profile:
                    profile(system.step)
                taken[name] += timed(system.step, args.seconds)
        base = {kind: kind(taken[args.systems[-1]]) for kind in (min, statistics.median)}
        for name, times in taken.items():
            figures = ", ".join(
                f"{label} {kind(times) * 1e3:.2f} ms ({base[kind] / kind(times):.2f} x)"
                for label, kind in (("best", min), ("median", statistics.median))
            )
            print(f"  {rows:3} rows  {name:12} {figures}", flush=True)


def profile(step: Callable[[], None]) -> None:
    """Where the time of ten steps goes, by operation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(10):
            step()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=45))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each system and round")
    parser.add_argument(
        "--systems", nargs="+", default=["compiled", "lean", "modules", "transformers"], help="ratios are to the last"
    )
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    groups = init_groups(Layout(), 0, "")
    for folder in args.folders:
        compare(folder, groups.tp, args)
    groups.close()


if __name__ == "__main__":
    main()
