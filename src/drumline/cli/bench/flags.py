"""Flags of ``drumline bench serve``; names that ``vllm bench serve`` has too mean the same."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

from drumline.cli.args import Parser

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
DATASETS = ("random", "custom", "sharegpt")
COUNTS = ("auto", "usage", "stream", "ids", "events")
_ENDPOINTS = (*PATHS, *PATHS.values())


def parser() -> Parser:
    """Of ``drumline bench serve``."""
    made = Parser(
        prog="drumline bench serve",
        usage="drumline bench serve [URL] [flags]",
        description="Load against any server of the OpenAI API. Exit code 1 if a request failed.",
    )
    url = os.environ.get("DRUMLINE_URL", "http://127.0.0.1:8000")
    made.add_argument("server", nargs="?", metavar="URL", help=f"the server ({url}; $DRUMLINE_URL)")
    _server_flags(made.add_argument_group("server"), url)
    _load_flags(made.add_argument_group("load"))
    _prompt_flags(made.add_argument_group("prompts and outputs"))
    _result_flags(made.add_argument_group("results"))
    return made


def _server_flags(group: Any, url: str) -> None:
    key = os.environ.get("DRUMLINE_API_KEY") or os.environ.get("OPENAI_API_KEY", "")
    group.add_argument("--base-url", default=url, metavar="URL", help="the same as URL")
    group.add_argument("--host", default=None, metavar="HOST", help="instead of a URL")
    group.add_argument("--port", type=int, default=None, metavar="PORT", help="instead of a URL")
    group.add_argument(
        "--endpoint", default="completions", choices=_ENDPOINTS, help="completions unless given", metavar="NAME"
    )
    group.add_argument("--model", default="", metavar="NAME", help="one of the server's models (the first)")
    group.add_argument("--api-key", default=key, metavar="KEY", help="$DRUMLINE_API_KEY, $OPENAI_API_KEY")
    group.add_argument("--header", action="append", default=[], metavar="N=V", help="further header, may be repeated")
    group.add_argument("--extra-body", type=_object, default={}, metavar="JSON", help="further fields of each request")
    group.add_argument(
        "--timeout", type=seconds, default=600.0, metavar="S", help="longest silence within an answer (600)"
    )
    group.add_argument("--ready-timeout", type=float, default=0.0, metavar="S", help="wait so long for the server (0)")


def _load_flags(group: Any) -> None:
    group.add_argument("--num-prompts", type=positive, metavar="N", help="requests (100, or those of the file)")
    group.add_argument("--request-rate", type=rate, default=math.inf, metavar="R", help="requests/s, Poisson (inf)")
    group.add_argument("--burstiness", type=seconds, default=1.0, metavar="X", help="below 1: in bursts (1)")
    group.add_argument("--max-concurrency", type=positive, metavar="N", help="most requests at once")
    group.add_argument(
        "--warmup", "--num-warmups", type=count, default=1, metavar="N", help="requests before, not counted (1)"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and times (0)")


def _prompt_flags(group: Any) -> None:
    group.add_argument(
        "--random-input-len", "--input-len", type=positive, default=128, metavar="N", help="tokens of a prompt (128)"
    )
    group.add_argument("--random-output-len", type=positive, default=128, metavar="N", help="tokens of an output (128)")
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="X", help="lengths vary by this share (0)"
    )
    group.add_argument("--random-prefix-len", type=count, default=0, metavar="N", help="common to all prompts (0)")
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="JSON lines, ShareGPT, or a prompt a line")
    group.add_argument("--dataset-name", choices=DATASETS, help="follows from --dataset-path", metavar="NAME")
    group.add_argument("--output-len", type=positive, metavar="N", help="of given prompts; the same as above else")
    group.add_argument("--tokenizer", default="", metavar="NAME", help="folder or hub name (the model's, if local)")
    group.add_argument("--prompts-as", choices=("auto", "ids", "text"), default="auto", help="ids for completions")
    group.add_argument("--ignore-eos", action="store_true", help="outputs have their whole length")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0: greedy (0)")


def _result_flags(group: Any) -> None:
    group.add_argument("--count-by", choices=COUNTS, default="auto", help="who counts output tokens (usage)")
    group.add_argument("--metric-percentiles", default="50,90,95,99", metavar="P,P", help="50,90,95,99")
    group.add_argument("--output-json", default="", metavar="FILE", help="all figures; -: to stdout")
    group.add_argument("--save-result", action="store_true", help="the same, in a file named by date and model")
    group.add_argument("--result-dir", default=".", metavar="DIR", help="where that is put")
    group.add_argument("--result-filename", default="", metavar="FILE", help="its name")
    group.add_argument("--save-detailed", action="store_true", help="with each request")
    group.add_argument("--quiet", "--disable-tqdm", action="store_true", help="no bar")


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found


def positive(text: str) -> int:
    """A whole number from 1 on."""
    return _at_least(text, 1)


def count(text: str) -> int:
    """A whole number from 0 on."""
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
    return int(text)


def rate(text: str) -> float:
    """A number above 0, or ``inf``."""
    return seconds(text, infinite=True)


def seconds(text: str, *, infinite: bool = False) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0 or (math.isinf(value) and not infinite):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0" + (" or inf" if infinite else ""))
    return value
