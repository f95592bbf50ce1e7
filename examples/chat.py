"""Talk to a model in the terminal, offline: LLM.chat keeps nothing, the conversation is this list.

    python examples/chat.py                          # the embedded default model
    python examples/chat.py path/to/model --tp 1

ctrl-C while it answers drops the answer; ctrl-D ends.
"""

import argparse

from drumline import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default="", help="folder or hub name; none: the embedded default model")
parser.add_argument("--tp", type=int, default=2, help="worker processes that share the model")
parser.add_argument("--system", default="You are a helpful assistant. Answer in one or two sentences.")
args = parser.parse_args()

params = SamplingParams(temperature=0.2, top_p=0.9, max_tokens=200)
with LLM(args.model, tensor_parallel_size=args.tp, log_level="warning") as llm:
    messages = [{"role": "system", "content": args.system}]
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            break
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            [output] = llm.chat(messages, params, use_tqdm=False)
        except KeyboardInterrupt:
            print("(dropped)")
            messages.pop()
            continue
        answer = output.outputs[0].text.strip()
        print(answer)
        # The next turn shares this one's KV cache blocks: only what is new is computed.
        messages.append({"role": "assistant", "content": answer})
