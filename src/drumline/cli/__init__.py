"""The `drumline` command: serve, chat, plan."""
