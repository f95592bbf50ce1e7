"""Models for programs: :class:`LLM` for plain ones. No process of the program's own ever imports torch."""

from __future__ import annotations

from drumline.llm.offline import LLM
from drumline.llm.options import make_config
from drumline.plan.sampling import SamplingParams
from drumline.text.results import CompletionOutput, Logprob, RequestOutput

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "make_config"]
