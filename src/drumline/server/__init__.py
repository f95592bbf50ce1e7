"""The HTTP side of drumline: OpenAI's API, health, metrics, a chat page, and the command's life from start to exit.

``sockets`` bind and name addresses; ``schema`` what clients send and get; ``errors`` the error shape; ``generation``
one HTTP request as one or more engine requests; ``chat`` and ``completions`` the two routes; ``service`` the state
that all routes share; ``app`` the routes; ``run`` the process. Nothing here imports torch or transformers.
"""
