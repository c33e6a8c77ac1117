"""An S3 server on this machine for tests, and what processes need to use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_VENV = Path(sys.prefix)
PYTHONPATH = f"{_VENV}/s3"
"""Folder of s3fs and what it needs (tools/setup.sh)."""
RANKS = 2
"""Ranks of a save that `s3_crashes.py` breaks."""
OLD, NEW = 0.0, 0.5
"""Added to a step to get the weights, so that the result says which attempt has written it."""


@dataclass
class S3:
    """A running server with the bucket `bucket`."""

    variables: dict[str, str]
    """Variables of a process that uses the server by s3fs."""
    told: IO[str]
    """A line for each order to hold requests, once one is held."""

    def order(self, **orders: Any) -> int:
        """Say what happens to requests from now on (`s3_program.py`); return how many came."""
        url = self.variables["AWS_ENDPOINT_URL"] + "/-/orders"
        request = urllib.request.Request(url, json.dumps(orders).encode(), method="PUT")
        with urllib.request.urlopen(request) as answer:
            return int(json.load(answer))


@contextmanager
def running_s3() -> Iterator[S3]:
    """Run moto's server until the block ends. tools/setup.sh installs it, and s3fs."""
    credentials = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    named = os.environ.get("UNBROKEN_AWS")
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python = (Path(named) if named else _VENV / "aws/bin") / "python"
    with subprocess.Popen(
        [python, Path(__file__).with_name("s3_program.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**own, **credentials},
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        assert port, "the server has not started: its output is above"
        yield S3(
            {
                **credentials,
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "PYTHONPATH": PYTHONPATH,
            },
            server.stdout,
        )
        server.stdin.close()
