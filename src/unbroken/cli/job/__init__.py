"""Commands about jobs: list, describe, explain, logs, stacks, blame, restart, delete."""
