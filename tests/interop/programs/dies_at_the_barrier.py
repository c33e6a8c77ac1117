"""Workers that wait for their rank; in the first pod one ends once its agent is ready.

The agent knows then that all wait.  The workers of the other pod do not come to the barrier.
"""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.request

from hyperpod_elastic_agent.ipc.client import InProcessRestartSocketClient

POLL_SECONDS = 0.05


def end_when_ready() -> None:
    """End this process once the agent has seen all of its workers wait."""
    url = f"http://{os.environ['AGENT_HOST']}:{os.environ['AGENT_PORT']}/status"
    while True:
        with urllib.request.urlopen(url, timeout=10) as answer:
            if json.load(answer)["status"] == "ready":
                os._exit(3)
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    if os.environ["UNBROKEN_POD"].endswith("-1"):
        threading.Event().wait()
    if os.environ["LOCAL_RANK"] == "1":
        threading.Thread(target=end_when_ready, daemon=True).start()
    InProcessRestartSocketClient().hyperpod_barrier()
