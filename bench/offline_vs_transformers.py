"""Offline throughput: drumline's LLM against transformers' `generate_batch` and static `generate()`, in one run.

    python bench/offline_vs_transformers.py [--model FOLDER] [--requests 1 16] [--rounds 3] [--json FILE]

The same prompts of random tokens for all (128 in, 128 out, greedy, end of sequence ignored, new ones each round),
float32, one compute thread each, one system at work at a time, in rotating order; a cell is the median over the rounds
of output tokens over the seconds of the whole call, prompts included. transformers lives in a process of its own with
the model loaded twice (the two ways set different attention). What is done for it:

* static `generate()`: one batch of equally long prompts, sdpa, no padding, no end-of-sequence check;
* `generate_batch`: its manager is started, and warmed by a request, before the clock starts and stopped after it
  stopped; the settings are the best of --pages x --batch-tokens, tried first on the larger batch with shorter outputs.

The default model is the embedded one. It is tokens that are compared in the end: how many of the sequences are equal to
static `generate()`'s is printed too (ties in float32 may differ).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from servers import ForeignLoad, about_machine

os.environ["OMP_NUM_THREADS"] = "1"

SYSTEMS = ("drumline", "generate_batch", "generate")
Call = dict[str, Any]


# ------------------------------------------------------------------------------------------------ transformers' process


def peer(model: str) -> None:
    """Answer calls, a JSON line each, on the descriptor that was stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(1)
    models = {
        "generate": AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval(),
        "generate_batch": AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(),
    }
    run = {"generate": static, "generate_batch": continuous}
    answer: Call = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    while True:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        line = sys.stdin.readline()
        if not line:
            return
        call = json.loads(line)
        answer = run[call["system"]](models[call["system"]], call)


def static(model: Any, call: Call) -> Call:
    import torch
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=call["output_len"], do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True
    )
    ids = torch.tensor(call["prompts"])
    began = time.perf_counter()
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "ids": found[:, ids.shape[1] :].tolist()}


def continuous(model: Any, call: Call) -> Call:
    import torch
    import transformers
    from transformers import ContinuousBatchingConfig, GenerationConfig

    # Its thread takes over inference mode, a little faster than its own no_grad, since 5.24; before, that breaks it.
    newer = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
    output_len, prompts, page = call["output_len"], call["prompts"], call["page"]
    # -1: no token ends a sequence.
    config = GenerationConfig(max_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = sum(-(-(len(prompt) + output_len) // page) for prompt in prompts) + 8
    size = {"page_size": page} if hasattr(ContinuousBatchingConfig(), "page_size") else {"block_size": page}
    settings = ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=call["batch_tokens"], **size)
    manager = model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=settings, block=True, timeout=5, warmup=True
    )
    with torch.inference_mode(newer), manager as manager:
        collect(manager, [prompt[::-1] for prompt in prompts[:1]], 2)
        began = time.perf_counter()
        found = collect(manager, prompts, output_len)
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "ids": found}


def collect(manager: Any, prompts: list[list[int]], output_len: int) -> list[list[int]]:
    names = manager.add_requests(inputs=prompts, max_new_tokens=output_len)
    found: dict[str, list[int]] = {}
    while len(found) < len(prompts):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error:
                raise SystemExit(f"generate_batch: {result.error}")
            found[result.request_id] = list(result.generated_tokens)
        elif result is None and not manager.is_running():
            raise SystemExit("generate_batch ended")
    return [found[name] for name in names]


class Peer:
    """transformers' process, from outside."""

    def __init__(self, model: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--peer", model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"},
        )
        self.about = self._answer()

    def call(self, **call: Any) -> Call:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Call:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"transformers' process ended with {self.process.wait()}")
        found: Call = json.loads(line)
        return found

    def end(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# ---------------------------------------------------------------------------------------------------------- comparison


class Bench:
    def __init__(self, llm: Any, peer: Peer, args: argparse.Namespace) -> None:
        from drumline.cli.bench.prompts import ordinary_ids

        self.llm = llm
        self.peer = peer
        self.args = args
        self.settings: dict[str, int] = {}
        self._ids = ordinary_ids(llm.get_tokenizer())

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        from drumline.cli.bench.prompts import Lengths, random_ids

        made = random_ids(count, Lengths(self.args.input_len, 1), seed, self._ids)
        return [list(prompt.content) for prompt in made]  # type: ignore[arg-type]

    def run(self, system: str, prompts: list[list[int]], output_len: int, **settings: int) -> Call:
        if system != "drumline":
            extra = (settings or self.settings) if system == "generate_batch" else {}
            found = self.peer.call(system=system, prompts=prompts, output_len=output_len, **extra)
        else:
            found = self._ours(prompts, output_len)
        assert [len(ids) for ids in found["ids"]] == [output_len] * len(prompts), (system, found)
        return found

    def _ours(self, prompts: list[list[int]], output_len: int) -> Call:
        from drumline import SamplingParams

        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=output_len)
        began = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "ids": [list(output.outputs[0].token_ids) for output in outputs]}

    def choose(self) -> list[Call]:
        """The best settings of generate_batch for this machine."""
        args, tried = self.args, []
        prompts = self.prompts(max(args.requests), 999)
        for page, tokens in itertools.product(args.pages, args.batch_tokens):
            settings = {"page": page, "batch_tokens": tokens}
            seconds = self.run("generate_batch", prompts, args.trial_output_len, **settings)["seconds"]
            tried.append({**settings, "seconds": seconds})
            say(f"generate_batch, page {page}, {tokens} tokens a batch: {seconds:.2f} s")
        best = min(tried, key=lambda one: one["seconds"])
        self.settings = {"page": best["page"], "batch_tokens": best["batch_tokens"]}
        return tried

    def compare(self, requests: int) -> dict[str, list[Call]]:
        args = self.args
        found: dict[str, list[Call]] = {system: [] for system in SYSTEMS}
        for system in SYSTEMS:
            self.run(system, self.prompts(requests, 998), 4)
        for turn in range(args.rounds):
            prompts = self.prompts(requests, turn)
            for system in SYSTEMS[turn % 3 :] + SYSTEMS[: turn % 3]:
                foreign = ForeignLoad()
                cell = self.run(system, prompts, args.output_len)
                cell["foreign_cores"] = foreign.cores()
                cell["output_throughput"] = requests * args.output_len / cell["seconds"]
                found[system].append(cell)
                busy = f"others keep {cell['foreign_cores']:.2f} cores busy"
                say(f"{requests} requests, {system}: {cell['output_throughput']:.1f} output tokens/s; {busy}")
        return found


def table(results: dict[int, dict[str, list[Call]]]) -> tuple[str, list[Call]]:
    heads = ["requests", "drumline", "generate_batch", "ratio", "generate()", "ratio", "sequences equal to generate()"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    rows = []
    for requests, found in results.items():
        speed = {name: statistics.median(c["output_throughput"] for c in cells) for name, cells in found.items()}
        equal = {name: equal_sequences(found[name], found["generate"]) for name in SYSTEMS[:2]}
        total = requests * len(found["generate"])
        ratios = {name: speed["drumline"] / speed[name] for name in SYSTEMS[1:]}
        cells = [str(requests), f"{speed['drumline']:.1f}"]
        for name in SYSTEMS[1:]:
            cells += [f"{speed[name]:.1f}", f"**{ratios[name]:.2f}**"]
        cells += [f"drumline {equal['drumline']}, generate_batch {equal['generate_batch']} of {total}"]
        lines.append("| " + " | ".join(cells) + " |")
        rows.append({"requests": requests, "output_tokens_per_s": speed, "ratios": ratios, "equal": equal, "of": total})
    return "\n".join(lines), rows


def equal_sequences(ours: list[Call], reference: list[Call]) -> int:
    pairs = zip(ours, reference, strict=True)
    return sum(a == b for one, other in pairs for a, b in zip(one["ids"], other["ids"], strict=True))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def default_folder() -> str:
    from drumline.config import ModelConfig
    from drumline.model.resolve import resolve

    return resolve(ModelConfig()).path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="", help="model folder (the embedded default model)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--trial-output-len", type=int, default=16, help="when settings are tried")
    parser.add_argument("--pages", type=int, nargs="+", default=[32, 256], help="page sizes of generate_batch to try")
    parser.add_argument("--batch-tokens", type=int, nargs="+", default=[512, 2048], help="its batch sizes to try")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        peer(args.peer)
        return
    from drumline import LLM

    model = args.model or default_folder()
    about = about_machine()
    print(f"{about}; {model}", flush=True)
    other = Peer(model)
    try:
        with LLM(model, dtype="float32", max_model_len=2048, kv_cache_memory_bytes=1 << 30) as llm:
            bench = Bench(llm, other, args)
            tried = bench.choose()
            results = {requests: bench.compare(requests) for requests in args.requests}
    finally:
        other.end()
    text, rows = table(results)
    every = [cell for found in results.values() for cells in found.values() for cell in cells]
    busy = statistics.median(cell["foreign_cores"] for cell in every)
    print(
        f"\nOutput tokens/s, {args.input_len} in, {args.output_len} out, medians of {args.rounds}; ratio: drumline / "
        f"peer; generate_batch with page {bench.settings['page']}, {bench.settings['batch_tokens']} tokens a batch; "
        f"others kept {busy:.2f} cores busy (median)\n\n{text}"
    )
    if args.json:
        args.json.write_text(
            json.dumps({"about": about, "peer": other.about, "tried": tried, "rows": rows, "runs": results}) + "\n"
        )


if __name__ == "__main__":
    main()
