"""What transformers makes of chats and texts, asked in a process of its own.

In the test process transformers' million objects would slow down every garbage collection of the leak checks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def ask(jobs: list[dict[str, Any]]) -> list[Any]:
    """Answers to jobs, each ``{"folder": ..., "call": name of a function below, "arguments": {...}}``."""
    command = [sys.executable, "-m", __spec__.name]
    run = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    answers: list[Any] = json.loads(run.stdout.splitlines()[-1])
    return answers


def chat(tokenizer: Any, conversation: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, **keywords)
        ids = tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False, **keywords)
    except Exception as error:  # noqa: BLE001 - whatever the template raises
        return {"error": str(error)}
    return {"text": text, "ids": list(ids)}


def texts(tokenizer: Any, samples: list[str]) -> list[dict[str, Any]]:
    rows = []
    for sample in samples:
        for special in (True, False):
            ids = tokenizer(sample, add_special_tokens=special)["input_ids"]
            decoded = {str(skip): tokenizer.decode(ids, skip_special_tokens=skip) for skip in (True, False)}
            rows.append({"text": sample, "special": special, "ids": ids, "decoded": decoded})
    return rows


def facts(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "special_tokens": dict(tokenizer.special_tokens_map),
        "ids": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
        "special_ids": sorted(tokenizer.all_special_ids),
    }


def main() -> None:
    from transformers import AutoTokenizer

    loaded: dict[str, Any] = {}
    answers = []
    for job in json.load(sys.stdin):
        folder = job["folder"]
        if folder not in loaded:
            loaded[folder] = AutoTokenizer.from_pretrained(folder)
        answers.append(globals()[job["call"]](loaded[folder], **job.get("arguments", {})))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
