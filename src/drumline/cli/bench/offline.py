"""``drumline bench offline``: what the library does in this process, without HTTP.

A round is one batch of new random prompts, all at once; before the first there are rounds that are not counted. Each
round is followed by one of other prompts with a single output token, which tells what the prompts cost; the rest is
decoding. No random prompt comes twice, so the prefix cache has nothing to give; given ones come in each round.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from drumline.cli.args import Parser, add_flags, configs, parse, refuse_unbuilt
from drumline.cli.bench import report
from drumline.cli.bench.flags import count, positive
from drumline.cli.bench.prompts import Lengths, Prompt, ordinary_ids, random_ids, read_prompts
from drumline.errors import ConfigError, DrumlineError, ExitCode, FailedError


def main(argv: Sequence[str]) -> int:
    """Run ``drumline bench offline``."""
    parser = _parser()
    options = parse(parser, argv)
    config, server = configs(options)
    refuse_unbuilt(options, config, server)
    try:
        return _run(options)
    except ConfigError:
        raise
    except DrumlineError as e:
        print(f"drumline bench offline: {e}", file=sys.stderr)
        return e.exit_code if isinstance(e, FailedError) else ExitCode.FAILED


def _parser() -> Parser:
    parser = Parser(
        prog="drumline bench offline",
        usage="drumline bench offline [MODEL] [flags]",
        description="Throughput and latency of the library in this process. Besides these flags, those of serve.",
    )
    group = parser.add_argument_group("bench")
    group.add_argument("--num-prompts", "--batch-size", type=positive, metavar="N", help="prompts of a round (16)")
    group.add_argument(
        "--random-input-len", "--input-len", type=positive, default=128, metavar="N", help="tokens of a prompt (128)"
    )
    group.add_argument("--random-output-len", type=positive, default=128, metavar="N", help="tokens of an output (128)")
    group.add_argument("--random-range-ratio", type=float, default=0.0, metavar="X", help="lengths vary (0)")
    group.add_argument("--dataset-path", metavar="FILE", help="JSON lines, ShareGPT, or a prompt a line")
    group.add_argument("--output-len", type=positive, metavar="N", help="of given prompts; the same as above else")
    group.add_argument("--repeats", "--num-iters", type=positive, default=3, metavar="N", help="rounds (3)")
    group.add_argument("--warmup", "--num-iters-warmup", type=count, default=1, metavar="N", help="before them (1)")
    group.add_argument("--json", "--output-json", dest="output_json", default="", metavar="FILE", help="-: to stdout")
    group.add_argument("--quiet", "--disable-tqdm", action="store_true", help="no bar")
    add_flags(parser, server=False)
    return parser


def _run(options: Any) -> int:
    from drumline.llm import LLM

    given = {name.partition(".")[2]: value for name, value in vars(options).items() if "." in name}
    given = {name: value for name, value in given.items() if value is not None}
    if options.model_tag is not None:
        given["model"] = options.model_tag
    began = time.perf_counter()
    with LLM(**given) as llm:
        start_s = time.perf_counter() - began
        rounds, interrupted = _measure(llm, options)
        if not rounds:
            return ExitCode.INTERRUPTED
        found = _result(rounds, llm) | {"start_s": start_s}
    where = sys.stderr if options.output_json == "-" else sys.stdout
    print(_table(found), file=where, flush=True)
    if options.output_json:
        try:
            report.save(found, options.output_json)
        except OSError as e:
            raise ConfigError(f"the result cannot be written: {e}") from None
    return ExitCode.INTERRUPTED if interrupted else ExitCode.OK


class Round:
    """One batch."""

    def __init__(self, seconds: float, first_token_s: float, outputs: Sequence[Any]) -> None:
        self.seconds = seconds
        self.first_token_s = first_token_s
        """Of a batch like it with one output token each."""
        self.prompts = len(outputs)
        self.input_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        self.output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)


def _measure(llm: Any, options: Any) -> tuple[list[Round], bool]:
    """The rounds, and whether ctrl-C ended them early."""
    rounds: list[Round] = []
    try:
        for index in range(options.warmup + options.repeats):
            seed = llm.config.model.seed + 2 * index
            seconds, outputs = _timed(llm, _prompts(llm, options, seed), options)
            others = _prompts(llm, options, seed + 1)
            first_s, _ = _timed(llm, [Prompt(prompt.content, prompt.tokens, 1) for prompt in others], options)
            if index >= options.warmup:
                rounds.append(Round(seconds, first_s, outputs))
                print(f"round {len(rounds)} of {options.repeats}: {seconds:.3f} s", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return rounds, True
    return rounds, False


def _prompts(llm: Any, options: Any, seed: int) -> list[Prompt]:
    tokenizer = None if llm.config.model.skip_tokenizer_init else llm.get_tokenizer()
    if options.dataset_path:
        from pathlib import Path

        return read_prompts(Path(options.dataset_path), options.num_prompts, options.output_len, seed, tokenizer)
    lengths = Lengths(
        options.random_input_len, options.output_len or options.random_output_len, options.random_range_ratio
    )
    return random_ids(options.num_prompts or 16, lengths, seed, ordinary_ids(tokenizer))


def _timed(llm: Any, prompts: Sequence[Prompt], options: Any) -> tuple[float, list[Any]]:
    from drumline.plan.sampling import SamplingParams

    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=prompt.output_tokens) for prompt in prompts]
    contents = [p.content if isinstance(p.content, str) else {"prompt_token_ids": p.content} for p in prompts]
    shown = sys.stderr.isatty() and not options.quiet
    began = time.perf_counter()
    outputs = llm.generate(contents, params, use_tqdm=shown)
    return time.perf_counter() - began, outputs


def _result(rounds: Sequence[Round], llm: Any) -> dict[str, Any]:
    prompts = rounds[0].prompts
    seconds = statistics.median(one.seconds for one in rounds)
    first = statistics.median(one.first_token_s for one in rounds)
    output = statistics.mean(one.output_tokens for one in rounds)
    given = statistics.mean(one.input_tokens for one in rounds)
    decoded = output - prompts
    decode_s = statistics.median(one.seconds - one.first_token_s for one in rounds)
    parallel = llm.config.parallel
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "model": llm.config.model.model or llm.config.model.path,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "num_prompts": prompts,
        "repeats": len(rounds),
        "input_tokens": given,
        "output_tokens": output,
        "batch_latency_s": seconds,
        "first_token_batch_s": first,
        "latencies_s": [one.seconds for one in rounds],
        "requests_per_second": prompts / seconds,
        "output_tokens_per_second": output / seconds,
        "tokens_per_second": (given + output) / seconds,
        "prefill_tokens_per_second": given / first,
        "decode_tokens_per_second": decoded / decode_s if decoded > 0 and decode_s > 0 else None,
    }


def _table(found: dict[str, Any]) -> str:
    every = found["latencies_s"]
    decode = found["decode_tokens_per_second"]
    rows = [
        f"{found['model']}: {found['num_prompts']} prompts, {found['input_tokens']:.0f} tokens in, "
        f"{found['output_tokens']:.0f} out, {found['repeats']} rounds (medians); start {found['start_s']:.1f} s",
        f"  latency of the batch    {found['batch_latency_s']:.3f} s ({min(every):.3f} to {max(every):.3f})",
        f"  until the first tokens  {found['first_token_batch_s']:.3f} s "
        f"({found['prefill_tokens_per_second']:.1f} prompt tokens/s)",
        f"  output tokens/s         {found['output_tokens_per_second']:.1f}"
        + (f" (decoding alone {decode:.1f})" if decode else ""),
        f"  tokens/s in all         {found['tokens_per_second']:.1f}",
        f"  requests/s              {found['requests_per_second']:.2f}",
    ]
    return "\n".join(rows)
