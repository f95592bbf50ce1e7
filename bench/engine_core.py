"""What a step costs beside its forward: the engine core, its executor and the model runner, with a forward that does
nothing.

    OMP_NUM_THREADS=1 python bench/engine_core.py [--model FOLDER] [--streams 1 8 32] [--cold MB] [--temperature 1]

The real loop over the real channel: a process of its own is the front end, which sends as many requests as there are
streams (128 tokens in and out), takes all outputs and begins again. The forward gives the same logits each time, and
reads ``--cold`` megabytes before, as the weights of a model would, since a step's bookkeeping runs with caches that the
forward has filled with something else. Prints the median of microseconds that decode steps spend in each phase:

    schedule   the plan
    dispatch   from there to the runner
    prepare    slots, ids, positions, attention batch, up to the forward
    sample     from the forward's end to the runner's answer
    answer     from there to the scheduler
    update     tokens to requests, what ends
    output     encoding and sending
    loop       the rest: messages, statistics

``--profile`` prints the functions that take most of the time instead.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import multiprocessing
import os
import pstats
import select
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_llama import make

from drumline.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from drumline.engine.capacity import pool_capacity
from drumline.engine.channel import CoreChannel
from drumline.engine.core import EngineCore
from drumline.engine.front import FrontChannel
from drumline.engine.main import make_scheduler
from drumline.engine.protocol import EngineOutputs, EngineRequest
from drumline.executor import Executor
from drumline.model.spec import read_spec
from drumline.plan.sampling import SamplingParams
from drumline.transport import Waiter

PHASES = ("schedule", "dispatch", "prepare", "forward", "sample", "answer", "update", "output", "loop")
TOKENS = 128


def front_end(door: socket.socket, commands: Connection) -> None:
    """The other process: (streams, rounds, temperature) comes, that many rounds are run, an answer goes back."""
    channel = FrontChannel()
    socket.send_fds(door, [b"x"], [channel.door])
    channel.close_door()
    poller = select.poll()
    poller.register(channel.fd, select.POLLIN)
    number = 0
    while (command := commands.recv()) is not None:
        streams, rounds, temperature = command
        sampling = SamplingParams(temperature=temperature, max_tokens=TOKENS, ignore_eos=True)
        for _ in range(rounds):
            for _ in range(streams):
                number += 1
                prompt = [(number * 7919 + place * 31) % 500 + 3 for place in range(TOKENS)]
                name = f"cmpl-{number:032x}-0"
                channel.send(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, seed=1))
            left = streams
            while left:
                for message in channel.receive():
                    if isinstance(message, EngineOutputs):
                        left -= sum(output.finish_reason is not None for output in message.outputs)
                if left:
                    poller.poll(1000)
        commands.send(None)
    channel.close()


class Marks:
    """When each step was where: the calls of the parts are wrapped."""

    def __init__(self) -> None:
        self.steps: list[list[float]] = []
        self._now: list[float] = []
        self.on = False

    def around(self, owner: Any, name: str) -> None:
        """Note the beginning and the end of each call."""
        inner: Callable[..., Any] = getattr(owner, name)
        clock = time.perf_counter
        marks = self

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            marks._now.append(clock())
            try:
                return inner(*args, **kwargs)
            finally:
                marks._now.append(clock())

        setattr(owner, name, wrapped)

    def first(self, owner: Any, name: str) -> None:
        """A step begins with this call."""
        self.around(owner, name)
        inner = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            step, self._now = self._now, []
            if self.on and len(step) == 10:
                self.steps.append([*step, time.perf_counter()])
            return inner(*args, **kwargs)

        setattr(owner, name, wrapped)

    def phases(self) -> dict[str, float]:
        """Median microseconds of each phase."""
        table = np.array(self.steps)
        # schedule 0 1, execute 2 .. 5 around forward 3 4, update 6 7, send 8 9, next step 10
        between = np.diff(table, axis=1) * 1e6
        between[:, 7] += between[:, 9]
        columns = between[:, [0, 1, 2, 3, 4, 5, 6, 8, 7]]
        return {name: float(np.median(columns[:, at])) for at, name in enumerate(PHASES)}


class Nothing:
    """A forward that does none of the work, and gives the same logits each time."""

    gathers = False

    def __init__(self, vocab_size: int, rows: int, cold_bytes: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._logits = torch.randn(rows, vocab_size, generator=generator) * 2
        self._given = self._logits
        self._cold = torch.ones(cold_bytes // 8, dtype=torch.int64)

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, batch: Any, keep: torch.Tensor) -> torch.Tensor:
        return self.compute(len(keep))

    def compute(self, rows: int) -> torch.Tensor:
        """What is timed."""
        if len(self._cold):
            self._cold.sum()
        if len(self._given) != rows:
            self._given = self._logits[:rows]
        return self._given


class Core:
    """All parts of an engine core process, in this one."""

    def __init__(self, folder: Path, door: int, most: int, cold_bytes: int) -> None:
        config = EngineConfig(
            model=ModelConfig(model=str(folder), path=str(folder), dtype="float32", max_model_len=2048),
            cache=CacheConfig(kv_cache_memory_bytes=1 << 28),
            scheduler=SchedulerConfig(max_num_seqs=max(64, most)),
        )
        self._waiter = Waiter.create("engine")
        self._executor = Executor.get_class(config)(config, waiter=self._waiter)
        spec = read_spec(folder)
        specs = self._executor.collective_rpc("get_kv_cache_spec")
        available = self._executor.collective_rpc("determine_available_memory")
        capacity = pool_capacity(specs, available, config.cache)
        self._executor.initialize_from_config(capacity.configs(1))
        runner = self._executor.collective_rpc(lambda worker: worker.runner)[0]
        runner.forward = Nothing(spec.vocab_size, most, cold_bytes)
        scheduler = make_scheduler(replace(config), spec, capacity, 2048)
        self._channel = CoreChannel(door, self._waiter.ring)
        self.core = EngineCore(self._executor, scheduler, self._waiter, self._channel, steps_here=True)
        self.marks = Marks()
        self.marks.around(runner, "execute")
        self.marks.around(runner.forward, "compute")
        self.marks.around(scheduler, "update")
        self.marks.around(self._channel, "send")
        self.marks.first(scheduler, "schedule")
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)

    def serve(self, commands: Connection, command: tuple[int, int, float]) -> None:
        """Run the loop until the front end has done what the command says."""

        def watch() -> None:
            commands.send(command)
            commands.recv()
            self.core.stop()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        self.core._stopping = False
        self.core.run()
        thread.join()

    def close(self) -> None:
        self._channel.close()
        self._executor.shutdown()


def measure(core: Core, commands: Connection, args: argparse.Namespace) -> None:
    print("| streams | " + " | ".join(PHASES) + " | all but forward |\n|" + " --- |" * (len(PHASES) + 2))
    for streams in args.streams:
        core.serve(commands, (streams, 2, args.temperature))
        found = []
        for _ in range(args.rounds):
            core.marks.steps, core.marks.on = [], True
            core.serve(commands, (streams, max(2, 64 // streams), args.temperature))
            found.append(core.marks.phases())
        phases = {name: min(round_[name] for round_ in found) for name in PHASES}
        total = statistics.median(sum(round_.values()) - round_["forward"] for round_ in found)
        columns = " | ".join(f"{phases[name]:.0f}" for name in PHASES)
        print(f"| {streams} | {columns} | {total:.0f} |", flush=True)


def profile(core: Core, commands: Connection, args: argparse.Namespace) -> None:
    for streams in args.streams:
        core.serve(commands, (streams, 2, args.temperature))
        profiler = cProfile.Profile()
        profiler.enable()
        core.serve(commands, (streams, max(2, 64 // streams), args.temperature))
        profiler.disable()
        print(f"{streams} streams")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: the random Llama of 5.0 M parameters")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--cold", type=int, default=0, help="megabytes that each forward reads")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    here, there = socket.socketpair()
    commands, answers = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=front_end, args=(there, answers), daemon=True)
    process.start()
    door = socket.recv_fds(here, 1, 1)[1][0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.model or make(Path(temporary))
        core = Core(folder, door, max(args.streams), args.cold << 20)
    try:
        (profile if args.profile else measure)(core, commands, args)
    finally:
        commands.send(None)
        process.join(10)
        core.close()
        os.close(door)


if __name__ == "__main__":
    main()
