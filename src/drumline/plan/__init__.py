"""What travels between engine core and workers: data only, numpy and msgspec, no torch.

``sampling`` what a request asks for, ``step`` the plan of one step and its output, ``kv`` what a worker says of its
KV cache and what it is told of it.
"""
