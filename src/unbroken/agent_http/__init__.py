"""The agent's protocol over HTTP: the server in each pod, and the operator's side."""
