"""Two pipeline stages whose forwards sleep: several micro-batches in flight against one, in one run.

    python bench/pipeline_overlap.py [--sleep-ms 20] [--stages 2] [--requests 8] [--tokens 50]

A tiny random model over real worker processes; each forward of each stage sleeps before it computes, as a large model
would compute. ``one in flight``: an executor that lets the engine core have one step in flight, so that a stage waits
while the others work. The micro-batches are the same: the requests dealt out over the stages. Prints output tokens/s of
both, how busy the stages were, and the ratio; exit code 1 if that is less than 0.9 times the number of stages.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from drumline import LLM, SamplingParams
from drumline.executor.mp import MultiprocExecutor


class Sleepy:
    """Mixed into the worker."""

    runner: Any

    def sleep_in_forward(self, seconds: float) -> None:
        """From now on each forward takes so much longer."""
        forward: Callable[..., Any] = self.runner.forward

        def slowly(*args: Any) -> Any:
            time.sleep(seconds)
            return forward(*args)

        self.runner.forward = slowly


class OneInFlight(MultiprocExecutor):
    """The next step is sent when the answer of the one before is there."""

    @property
    def max_concurrent_batches(self) -> int:
        """One."""
        return 1


def make_model(folder: str, layers: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=307,
        hidden_size=72,
        intermediate_size=131,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_hidden_layers=layers,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def measure(folder: str, backend: str, args: argparse.Namespace) -> float:
    """Output tokens a second."""
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": [3 + i, 5, 7, 11]} for i in range(args.requests)]
    with LLM(
        folder,
        pipeline_parallel_size=args.stages,
        distributed_executor_backend=backend,
        worker_extension_cls="pipeline_overlap:Sleepy",
        skip_tokenizer_init=True,
        max_num_seqs=args.requests,
        log_level="warning",
        recovery="off",
    ) as llm:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        llm.collective_rpc("sleep_in_forward", args=(args.sleep_ms / 1000,))
        began, before = time.perf_counter(), llm.stats()
        llm.generate(prompts, params, use_tqdm=False)
        took, after = time.perf_counter() - began, llm.stats()
    active = after.active_s - before.active_s
    pairs = zip(after.stage_busy_s, before.stage_busy_s, strict=True)
    busy = ", ".join(f"{(now - was) / active:.0%}" for now, was in pairs)
    rate = args.requests * args.tokens / took
    print(
        f"{'one in flight' if backend != 'mp' else 'pipeline':14} {rate:8.1f} tokens/s   stages busy {busy}", flush=True
    )
    return rate


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sleep-ms", type=float, default=20.0, help="of each forward of each stage")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=50, help="of each request")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, 2 * args.stages)
        print(f"{args.stages} stages, {args.sleep_ms:g} ms each, {args.requests} requests of {args.tokens} tokens")
        one, many = (measure(folder, backend, args) for backend in ("pipeline_overlap:OneInFlight", "mp"))
    print(f"{'ratio':14} {many / one:8.2f}")
    return 0 if many / one >= 0.9 * args.stages else 1


if __name__ == "__main__":
    sys.exit(main())
