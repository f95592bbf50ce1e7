"""Text on its way in and out: tokenising, chat templates, detokenising, stop strings, requests and results.

``tokenizer`` and ``chat`` turn prompts and conversations into token ids, ``requests`` checks them and makes requests
to the engine of them, ``detokenize`` and ``results`` turn its outputs into text and into the objects that users get.
No torch and no transformers here: the API server starts in the time that ``tokenizers`` needs.
"""
