"""The socket between the agent and its workers."""
