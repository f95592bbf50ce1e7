"""The language model of one rank: resolving, loading, parallel layers, attention, sampling, runner, worker.

``resolve``, ``spec``, ``default_model`` and ``progress`` import no torch, so that front ends may use them; the rest is
for worker processes.
"""
