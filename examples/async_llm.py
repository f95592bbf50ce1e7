"""Many requests at once from one event loop: answers come as they are made, and one that is not wanted is dropped.

python examples/async_llm.py                     # the embedded default model
python examples/async_llm.py path/to/model --tp 1
"""

import argparse
import asyncio
import time

from drumline import AsyncLLM, RequestOutputKind, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default="", help="folder or hub name; none: the embedded default model")
parser.add_argument("--tp", type=int, default=2, help="worker processes that share the model")
args = parser.parse_args()

QUESTIONS = ["What is a drum?", "Why is the sky blue?", "Name three rivers.", "What is 12 times 12?"]


async def answer(llm: AsyncLLM, question: str) -> str:
    """One of several tasks. Tokens of all of them are made in the same steps."""
    params = SamplingParams(temperature=0, max_tokens=40, output_kind=RequestOutputKind.FINAL_ONLY)
    async for output in llm.chat([{"role": "user", "content": question}], params):
        return output.outputs[0].text.strip()
    return ""


async def main() -> None:
    async with AsyncLLM(args.model, tensor_parallel_size=args.tp, log_level="warning") as llm:
        # What comes is new text only, as a console wants it.
        params = SamplingParams(temperature=0.8, max_tokens=60, seed=1, output_kind=RequestOutputKind.DELTA)
        async for output in llm.generate("Once upon a time", params):
            print(output.outputs[0].text, end="", flush=True)
        print()

        began = time.monotonic()
        for question, text in zip(QUESTIONS, await asyncio.gather(*(answer(llm, q) for q in QUESTIONS)), strict=True):
            print(f"{question} {text}")
        print(f"all four in {time.monotonic() - began:.1f} s")

        # Leaving the loop ends the request in the engine too; so do a task's cancellation and llm.abort(id).
        async for output in llm.generate("One, two, three,", SamplingParams(max_tokens=1000), request_id="counting"):
            if len(output.outputs[0].token_ids) >= 12:
                break
        print("stopped at:", output.outputs[0].text.strip())


asyncio.run(main())
