"""Pipeline parallelism: the model's layers cut into stages, each of them shared by tensor-parallel workers or not.

    python examples/pipeline.py                      # the embedded default model, two stages
    python examples/pipeline.py path/to/model --pp 2 --tp 2 --layers 10,20

A worker holds its stage's weights and KV cache only. Several batches are under way at once, one in each stage.
`drumline plan -pp 2 -tp 2` shows which process has which part.
"""

import argparse

from drumline import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default="", help="folder or hub name; none: the embedded default model")
parser.add_argument("--pp", type=int, default=2, help="stages")
parser.add_argument("--tp", type=int, default=1, help="workers of each stage")
parser.add_argument("--layers", help="layers of each stage, such as 10,20; by default of equal cost")
args = parser.parse_args()


def part(worker):
    """Runs in each worker."""
    weights = sum(weight.numel() for weight in worker.model.parameters())
    layers = worker.get_kv_cache_spec().num_layers
    return f"rank {worker.rank}: {weights / 1e6:.2f} million weights, KV cache of {layers} layers"


with LLM(
    args.model,
    pipeline_parallel_size=args.pp,
    tensor_parallel_size=args.tp,
    pp_layer_partition=args.layers,
    log_level="warning",
) as llm:
    print(*llm.collective_rpc(part), sep="\n")
    prompts = ["The capital of France is", "Two plus two is", "Water is made of", "The sun is"]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
