"""drumline serve on one or more GPUs: greedy tokens in float32 against transformers, then a run in bfloat16.

    python bench/serve_on_gpu.py MODEL_FOLDER [--tp 1] [--pp 1]

1. float32: PROMPTS chat-less completions at once through HTTP, greedy, 64 tokens; compared token by token with
   transformers' ``generate`` on the same GPU. A difference is examined as promise 6 of the design has it: excused if
   the reference's two best logits at that place are closer than 1e-4 of their standard deviation.
2. bfloat16 (the checkpoint's type, ``--dtype auto``): the same requests; tokens/s with 1, 8 and 32 streams.

Exit code 1 if a sequence differs without excuse, or if more than 1 % are excused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time there was a drummer who",
    "Water boils at",
    "The three laws of thermodynamics say that",
    "A poem about the sea:\n",
    "import numpy as np\n",
    "The quick brown fox",
]
TOKENS = 64


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    """drumline serve, as a context."""

    def __init__(self, model: str, dtype: str, args: argparse.Namespace) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "drumline", "serve", model, "--dtype", dtype, "--port", str(self.port)]
        command += ["--served-model-name", "m", "-tp", str(args.tp), "-pp", str(args.pp)]
        self._log = Path(args.logs, f"serve-{dtype}.log")
        self._began = time.monotonic()
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=os.environ)
        self.base = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Server:
        while True:
            if self._process.poll() is not None:
                raise SystemExit(f"the server ended: {self._log.read_text()[-3000:]}")
            try:
                if httpx.get(f"{self.base}/readyz").status_code == 200:
                    print(f"ready after {time.monotonic() - self._began:.1f} s", flush=True)
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        began = time.monotonic()
        self._process.wait(30)
        print(f"ended after {time.monotonic() - began:.2f} s with exit code {self._process.returncode}", flush=True)

    async def complete(self, client: httpx.AsyncClient, prompt: list[int], tokens: int) -> list[int]:
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = await client.post(f"{self.base}/v1/completions", json=body | {"return_token_ids": True}, timeout=300)
        answer.raise_for_status()
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    async def all(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=256)) as client:
            return list(await asyncio.gather(*[self.complete(client, prompt, tokens) for prompt in prompts]))


def reference(folder: str, prompts: list[list[int]]) -> tuple[list[list[int]], list[Any]]:
    """Greedy tokens of transformers in float32, and the logits of each place."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    tokens, logits = [], []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt], device="cuda")
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=None,
                output_logits=True,
                return_dict_in_generate=True,
            )
            tokens.append(out.sequences[0, len(prompt) :].tolist())
            logits.append([step[0].float().cpu() for step in out.logits])
    del model
    torch.cuda.empty_cache()
    return tokens, logits


def compare(got: list[list[int]], want: list[list[int]], logits: list[Any]) -> tuple[int, int]:
    """(sequences that differ without excuse, sequences excused)."""
    wrong = excused = 0
    for number, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        if place is None:
            continue
        row = logits[number][place]
        best = row.topk(2).values
        if float(best[0] - best[1]) < 1e-4 * float(row.std()):
            excused += 1
        else:
            wrong += 1
            print(f"sequence {number} differs at {place}: {mine[place]} for {theirs[place]}, gap {best.tolist()}")
    return wrong, excused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--logs", default="/tmp")
    args = parser.parse_args()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(args.model, "tokenizer.json")))
    rng = random.Random(0)
    vocabulary = tokenizer.get_vocab_size()
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    prompts += [[rng.randrange(100, vocabulary) for _ in range(rng.randrange(1, 700))] for _ in range(56)]
    want, logits = reference(args.model, prompts)
    with Server(args.model, "float32", args) as server:
        got = asyncio.run(server.all(prompts, TOKENS))
        again = asyncio.run(server.all(prompts[:4], TOKENS))
    wrong, excused = compare(got + again, want + want[:4], logits + logits[:4])
    print(f"float32: {len(got) + len(again)} sequences, {wrong} differ, {excused} excused", flush=True)
    result: dict[str, Any] = {"float32_differ": wrong, "float32_excused": excused, "sequences": len(got) + len(again)}
    with Server(args.model, "auto", args) as server:
        got = asyncio.run(server.all(prompts[:8], TOKENS))
        print("bfloat16:", tokenizer.decode(got[0])[:100].replace("\n", " "), flush=True)
        for streams in (1, 8, 32):
            began = time.monotonic()
            asyncio.run(server.all([[*prompts[-1][:100], i + 100] for i in range(streams)], 128))
            result[f"bfloat16_tokens_per_s_{streams}"] = round(streams * 128 / (time.monotonic() - began), 1)
    print(json.dumps(result))
    raise SystemExit(1 if wrong or excused * 100 > len(got) + len(again) else 0)


if __name__ == "__main__":
    main()
