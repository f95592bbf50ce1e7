"""Models for programs: :class:`LLM` for plain ones, :class:`AsyncLLM` for those with an asyncio loop.

No process of the program's own ever imports torch.
"""

from __future__ import annotations

from drumline.llm.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from drumline.llm.offline import LLM
from drumline.llm.online import AsyncLLM
from drumline.llm.options import make_config
from drumline.llm.warm import warm_start
from drumline.plan.sampling import RequestOutputKind, SamplingParams
from drumline.text.results import CompletionOutput, Logprob, RequestOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "make_config",
    "warm_start",
]
