"""moto's server in a process for tests: EC2 and Auto Scaling, with a log of actions. Run by path.

`ec2_program.py FOLDER`, with a Python that has moto. It prints its port, and writes each action as
a line to FOLDER/actions (`RebootInstances i-0abc`). The file FOLDER/refuse has an action, a status
and an error code, one a line. While it exists, that action gets this error as its answer. With
`hang` in the second line, the action is never answered.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

FOLDER = Path(sys.argv[1])
REFUSAL = (
    "<Response><Errors><Error><Code>{code}</Code><Message>refused by the test</Message></Error>"
    "</Errors><RequestID>1</RequestID></Response>"
)


class Recording:
    """moto's application; what passes is written down."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length)
        environ["wsgi.input"] = io.BytesIO(body)
        form = {key: values[0] for key, values in parse_qs(body.decode(errors="replace")).items()}
        action = form.get("Action", "")
        instance = form.get("InstanceId.1") or form.get("InstanceId") or ""
        with (FOLDER / "actions").open("a") as file:
            file.write(f"{action} {instance}\n")
        refusal = FOLDER / "refuse"
        words = refusal.read_text().split("\n") if refusal.exists() else [""]
        if action and words[0] == action:
            if words[1] == "hang":
                threading.Event().wait()
            text = REFUSAL.format(code=words[2]).encode()
            start_response(f"{words[1]} Refused", [("Content-Type", "text/xml")])
            return [text]
        answered: Iterable[bytes] = self._app(environ, start_response)
        return answered


server = make_server(
    "127.0.0.1", 0, Recording(DomainDispatcherApplication(create_backend_app)), threaded=True
)
sys.stdout.write(f"{server.port}\n")
sys.stdout.flush()
server.serve_forever()
