"""The engine: scheduler, KV blocks, core loop, and the clients that talk to it. Imports no torch."""
