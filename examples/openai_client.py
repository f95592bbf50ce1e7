"""The official openai package against a server of ours (or of anybody else): chats, streams, completions, models.

drumline serve                                   # in another terminal
python examples/openai_client.py                 # http://127.0.0.1:8000/v1
python examples/openai_client.py http://host:8000/v1 --api-key secret
"""

import argparse

from openai import BadRequestError, OpenAI

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000/v1")
parser.add_argument("--api-key", default="none", help="what the server was started with, if it was")
args = parser.parse_args()

with OpenAI(base_url=args.url, api_key=args.api_key) as client:
    model = client.models.list().data[0].id
    print("model:", model)

    talk = [{"role": "user", "content": "What is a drum?"}]
    answer = client.chat.completions.create(model=model, messages=talk, max_completion_tokens=40, temperature=0)
    print(answer.choices[0].message.content, answer.usage)

    options = {"include_usage": True}
    for event in client.chat.completions.create(
        model=model, messages=talk, max_completion_tokens=40, temperature=0, stream=True, stream_options=options
    ):
        if event.choices and event.choices[0].delta.content:
            print(event.choices[0].delta.content, end="", flush=True)
    print()

    several = client.completions.create(
        model=model,
        prompt=["One, two,", "Red, green,"],
        max_tokens=8,
        n=2,
        seed=1,
        logprobs=1,
        # What OpenAI's API does not have, vLLM's and this one do.
        extra_body={"top_k": 20, "min_p": 0.05},
    )
    for choice in several.choices:
        print(choice.index, repr(choice.text), choice.finish_reason)

    try:
        client.chat.completions.create(model=model, messages=talk, temperature=3)
    except BadRequestError as error:
        print("refused:", error.body["message"])
