"""Do TP 2, PP 2 and EP 2 on two GPUs give the tokens of TP 1? In float32, through NCCL and the fast all-reduce.

    python bench/gpu_parallel_equality.py [MODEL_FOLDER ...] [--json FILE]

Each folder, a tiny random Llama and a tiny random Qwen3-MoE that are made here, run on one GPU and then in each
arrangement: greedy tokens of 32 prompts of token ids, 48 tokens each, through ``LLM``. Only a difference is examined:
it is excused if transformers' two best logits at that place are closer than 1e-4 of their standard deviation over the
vocabulary, and then the comparison of that sequence ends there. For each arrangement the all-reduce that the workers
chose is printed; an arrangement that this version refuses is printed with its reason and is no failure.

Exit code 1 if a sequence differs without excuse, if more than 1 % are excused, or if a fast all-reduce was asked for
and none was used; 2 without two GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from drumline import LLM, SamplingParams
from drumline.errors import ConfigError, FailedError
from drumline.platforms import CudaPlatform

PROMPTS, TOKENS = 32, 48
NCCL: dict[str, Any] = {"disable_custom_all_reduce": True}
TP: dict[str, Any] = {"tensor_parallel_size": 2}
ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "TP 2, NCCL": TP | NCCL,
    "TP 2, fast": TP,
    "PP 2": {"pipeline_parallel_size": 2},
}
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "EP 2, NCCL": TP | NCCL | {"enable_expert_parallel": True},
    "EP 2, fast": TP | {"enable_expert_parallel": True},
    "EP 2, rows to their experts": TP | {"enable_expert_parallel": True, "all2all_backend": "all_to_all"},
    "EP 2, all rows to all": TP | {"enable_expert_parallel": True, "all2all_backend": "allgather_reducescatter"},
    "EP 2, experts move": TP
    | {
        "enable_expert_parallel": True,
        "enable_eplb": True,
        "eplb_config": {"step_interval": 5, "window_size": 8, "num_redundant_experts": 2},
    },
}


def choice_of(worker: Any) -> str:
    """What a worker's TP group sums through."""
    choice = worker.groups.all_reduce_choice
    return "none needed" if choice is None else str(choice.text())


def run(folder: str, prompts: list[list[int]], options: dict[str, Any]) -> tuple[list[list[int]], str]:
    """Greedy tokens, and the all-reduce that was chosen."""
    llm = LLM(
        folder, dtype="float32", platform="cuda", skip_tokenizer_init=True, max_model_len=512, recovery="off", **options
    )
    with llm:
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs], llm.collective_rpc(choice_of)[0]


def make_moe(folder: Path) -> Path:
    """A Qwen3-MoE with random weights: 8 experts of which 2 are used. Run in a process of its own."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
    )
    Qwen3MoeForCausalLM(config).eval().save_pretrained(folder)
    return folder


def make_llama(folder: Path) -> Path:
    """A Llama with random weights. Run in a process of its own."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


def gaps(folder: str, sequences: list[list[int]]) -> list[tuple[float, float]]:
    """Of each sequence's next token: distance of transformers' two best logits, and all logits' standard deviation."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    found = []
    with torch.inference_mode():
        for ids in sequences:
            row = model(torch.tensor([ids], device="cuda")).logits[0, -1]
            best = row.topk(2).values
            found.append((float(best[0] - best[1]), float(row.std())))
    return found


def apart(function: str, *arguments: Any) -> Any:
    """Call a function of this module in a process of its own, which may import torch and use a GPU."""
    call = [sys.executable, __file__, "--call", json.dumps([function, *arguments])]
    done = subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])


def compare(folder: str, prompts: list[list[int]], want: list[list[int]], got: list[list[int]]) -> tuple[int, int]:
    """(sequences that differ without excuse, sequences excused)."""
    places = [
        next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        for mine, theirs in zip(got, want, strict=True)
    ]
    differing = [(number, place) for number, place in enumerate(places) if place is not None]
    if not differing:
        return 0, 0
    found = apart("gaps", folder, [prompts[number] + want[number][:place] for number, place in differing])
    excused = [gap < 1e-4 * deviation for gap, deviation in found]
    for (number, place), (gap, deviation), fine in zip(differing, found, excused, strict=True):
        print(f"    sequence {number} differs at {place}: gap {gap:.2e}, deviation {deviation:.2e}, excused: {fine}")
    return excused.count(False), excused.count(True)


def vocabulary(folder: str) -> int:
    return int(json.loads(Path(folder, "config.json").read_text())["vocab_size"])


def look(name: str, folder: str, arrangements: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each arrangement of a model."""
    rng, size = random.Random(0), vocabulary(folder)
    prompts = [[rng.randrange(5, size) for _ in range(rng.randrange(1, 200))] for _ in range(PROMPTS)]
    try:
        want, _ = run(folder, prompts, {})
    except ConfigError as error:
        print(f"{name}: refused: {error}", flush=True)
        return [{"model": name, "arrangement": "TP 1", "refused": str(error)}]
    rows = []
    for arrangement, options in arrangements.items():
        row: dict[str, Any] = {"model": name, "arrangement": arrangement}
        began = time.monotonic()
        try:
            got, row["all_reduce"] = run(folder, prompts, options)
            row["differ"], row["excused"] = compare(folder, prompts, want, got)
            row["sequences"] = len(got)
            said = f"{row['differ']} of {len(got)} differ, {row['excused']} excused; {row['all_reduce']}"
        except ConfigError as error:
            row["refused"] = str(error)
            said = f"refused: {error}"
        except FailedError as error:
            row["failed"] = str(error)
            said = f"failed: {error}"
        row["seconds"] = round(time.monotonic() - began, 1)
        print(f"{name}, {arrangement}: {said} ({row['seconds']} s)", flush=True)
        rows.append(row)
    return rows


def is_bad(row: dict[str, Any]) -> bool:
    if "refused" in row:
        return False
    if "failed" in row or row["differ"] or row["excused"] * 100 > row["sequences"]:
        return True
    return "fast" in row["arrangement"] and "shot" not in row["all_reduce"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL_FOLDER")
    parser.add_argument("--json", type=Path, help="file for all rows")
    parser.add_argument("--call", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.call:
        function, *arguments = json.loads(args.call)
        found = {"make_moe": make_moe, "make_llama": make_llama, "gaps": gaps}[function](*arguments)
        print(json.dumps(str(found) if isinstance(found, str | Path) else found))
        return 0
    platform = CudaPlatform()
    count = len(platform.device_table().devices) if platform.is_available() else 0
    if count < 2:
        print(f"needs two GPUs and a torch that can use them; found {count}: nothing was compared")
        return 2
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        llama, moe = (apart(f"make_{name}", str(Path(folder, name))) for name in ("llama", "moe"))
        rows += look("tiny Llama", llama, ARRANGEMENTS)
        for path in args.models:
            rows += look(Path(path).name, path, ARRANGEMENTS)
        rows += look("tiny Qwen3-MoE", moe, ARRANGEMENTS | WITH_EXPERTS)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    bad = [row for row in rows if is_bad(row)]
    print(f"{len(rows)} arrangements, {len(bad)} bad, {sum('refused' in row for row in rows)} refused")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
