"""Every sampling parameter, each in a request whose effect can be seen.

python examples/sampling.py                      # the embedded default model
python examples/sampling.py path/to/model --tp 1
"""

import argparse

from drumline import LLM, BeamSearchParams, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default="", help="folder or hub name; none: the embedded default model")
parser.add_argument("--tp", type=int, default=2, help="worker processes that share the model")
args = parser.parse_args()

PROMPT = "The best thing about music is"

with LLM(args.model, tensor_parallel_size=args.tp, log_level="warning") as llm:
    tokenizer = llm.get_tokenizer()
    word = tokenizer.encode(" the", add_special_tokens=False)[0]
    digits = [tokenizer.encode(digit, add_special_tokens=False)[-1] for digit in "0123456789"]
    asked = {
        "greedy": SamplingParams(temperature=0, max_tokens=20),
        "the model's defaults": llm.get_default_sampling_params(),
        # Which tokens may be drawn.
        "temperature": SamplingParams(temperature=1.5, seed=1, max_tokens=20),
        "top_k": SamplingParams(top_k=5, seed=1, max_tokens=20),
        "top_p": SamplingParams(top_p=0.8, seed=1, max_tokens=20),
        "min_p": SamplingParams(min_p=0.2, seed=1, max_tokens=20),
        # What was said already counts less: per token, per time that it was said, as a factor (prompt included).
        "presence_penalty": SamplingParams(presence_penalty=2.0, temperature=0, max_tokens=20),
        "frequency_penalty": SamplingParams(frequency_penalty=2.0, temperature=0, max_tokens=20),
        "repetition_penalty": SamplingParams(repetition_penalty=1.5, temperature=0, max_tokens=20),
        # Single tokens and words.
        "logit_bias": SamplingParams(logit_bias={word: -100.0}, temperature=0, max_tokens=20),
        "bad_words": SamplingParams(bad_words=["the", "you"], temperature=0, max_tokens=20),
        "allowed_token_ids": SamplingParams(allowed_token_ids=digits, temperature=0, max_tokens=5),
        # Where an output ends.
        "stop": SamplingParams(stop=[".", "!"], include_stop_str_in_output=True, temperature=0, max_tokens=60),
        "stop_token_ids": SamplingParams(stop_token_ids=[word], temperature=0, max_tokens=60),
        "min_tokens, ignore_eos": SamplingParams(min_tokens=15, ignore_eos=True, temperature=0, max_tokens=15),
        "skip_special_tokens": SamplingParams(skip_special_tokens=False, temperature=0, max_tokens=20),
        "detokenize": SamplingParams(detokenize=False, temperature=0, max_tokens=5),
        # Several outputs: all of them, or the most likely of them.
        "n, seed": SamplingParams(n=2, seed=7, max_tokens=10),
        "best_of": SamplingParams(n=1, best_of=3, seed=7, max_tokens=10),
        # How likely it was.
        "logprobs": SamplingParams(logprobs=2, temperature=0, max_tokens=3),
        "prompt_logprobs": SamplingParams(prompt_logprobs=1, temperature=0, max_tokens=1),
    }
    for name, output in zip(asked, llm.generate([PROMPT] * len(asked), list(asked.values())), strict=True):
        for one in output.outputs:
            print(f"{name:24} {one.text or one.token_ids!r} ({one.finish_reason})")
        if output.outputs[0].logprobs:
            for row in output.outputs[0].logprobs:
                print(" " * 24, {entry.decoded_token: round(entry.logprob, 2) for entry in row.values()})
        if output.prompt_logprobs:
            total = sum(
                row[token].logprob
                for token, row in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
                if row is not None
            )
            print(" " * 24, f"log-probability of the prompt: {total:.2f}")

    # Not sampled at all: the most likely sequences.
    [found] = llm.beam_search(PROMPT, BeamSearchParams(beam_width=3, max_tokens=10))
    for beam in found.sequences:
        print(f"{'beam search':24} {beam.text} ({beam.cum_logprob:.2f})")
