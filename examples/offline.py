"""Generate from a list of prompts, offline, on two worker processes.

    python examples/offline.py                       # the embedded default model
    python examples/offline.py path/to/model --tp 1

No main guard is needed: drumline never runs this file again in another process.
"""

import argparse

from drumline import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default="", help="folder or hub name; none: the embedded default model")
parser.add_argument("--tp", type=int, default=2, help="worker processes that share the model")
args = parser.parse_args()

prompts = [
    "The capital of France is",
    "Water boils at a temperature of",
    "The three primary colours are",
    "Once upon a time, there was a",
]
params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32, seed=1, stop=["\n"])

with LLM(args.model, tensor_parallel_size=args.tp, log_level="warning") as llm:
    for output in llm.generate(prompts, params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")

    # Greedy, several answers at once, and the model's own confidence in each token.
    [output] = llm.generate("Two plus two is", SamplingParams(temperature=0, max_tokens=4, logprobs=2))
    best = output.outputs[0]
    for token, row in zip(best.token_ids, best.logprobs, strict=True):
        print({entry.decoded_token: round(entry.logprob, 2) for entry in row.values()}, "chose", row[token].rank)
