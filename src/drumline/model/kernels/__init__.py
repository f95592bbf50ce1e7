"""Compiled kernels of the forward on CPUs: numba functions over addresses. See ``jit``."""
