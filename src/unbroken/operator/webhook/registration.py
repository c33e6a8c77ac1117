"""The webhook that the API server calls before it stores a job: its process and its registration.

Every operator serves it, not only the leader: it decides by the job alone. The server is `server`,
a process of its own. The API server gets a path with a secret, so that only it can call. For a pod
template, the webhook asks the API server itself: it creates the pod as a dry run, if the user may
create it. An absent operator delays no job (`failurePolicy: Ignore`): the operator refuses such a
job in its status when it is back.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

import msgspec
from lightkube.resources.admissionregistration_v1 import ValidatingWebhookConfiguration

from unbroken.core.keys import derive
from unbroken.errors import SpecError, WorldError
from unbroken.kube.backoff import Backoff, persist
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.clock import entropy, monotonic, pause, wall
from unbroken.kube.errors import NotFound
from unbroken.kube.informer import Informer
from unbroken.kube.workqueue import WorkQueue
from unbroken.log_lines import Log
from unbroken.spec.job.types import GROUP, PLURAL, VERSION
from unbroken.spec.keys import OWN_GROUP

from .certificates import Authority, Leaf
from .server import WebhookSettings

log = Log(__name__)

MODULE = "unbroken.operator.webhook.server"
RESTARTS = Backoff(first=0.2, limit=30.0)
STEADY_SECONDS = 60.0
"""Seconds that a process must live to end a run of failures."""
CLOSING_SECONDS = 3.0


class WebhookProcess:
    """One process after another, all on one listening socket."""

    def __init__(self, listening: socket.socket, settings: WebhookSettings) -> None:
        self._listening = listening
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None

    def renew(self, leaf: Leaf) -> None:
        """Use a new certificate from now on."""
        self._settings.leaf = leaf
        if self._process is not None:
            self._send(self._process, leaf)

    async def run(self) -> None:
        """Keep a process running until cancelled."""
        random, failures = entropy(), 0
        while True:
            began = monotonic()
            try:
                ended = f"exit_code={await self._run_once()}"
            except OSError as error:  # no memory, descriptor or process for another
                ended = f'reason="{error}"'
            failures = 1 if monotonic() - began > STEADY_SECONDS else failures + 1
            log.warning("webhook ended", reason=ended, failures=failures)
            await pause(RESTARTS.delay(failures, random))

    async def _run_once(self) -> int:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=[self._listening.fileno()],
        )
        self._process = process
        self._send(process, self._settings)
        try:
            return await process.wait()
        finally:
            self._process = None
            assert process.stdin is not None
            process.stdin.close()
            try:
                async with asyncio.timeout(CLOSING_SECONDS):
                    await process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    process.kill()

    def _send(self, process: asyncio.subprocess.Process, message: object) -> None:
        assert process.stdin is not None
        with suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(message) + b"\n")


NAME = "unbroken-jobs"
"""Name of the ValidatingWebhookConfiguration."""
PATH = "/validate"
REGISTRATIONS = "apis/admissionregistration.k8s.io/v1"
CONFIGURATIONS = f"{REGISTRATIONS}/validatingwebhookconfigurations"
TIMEOUT_SECONDS = 10
"""Seconds that the API server waits (its default)."""
BACKLOG = 64
LOOK_SECONDS, SETTLE_SECONDS = 3600.0, 1.0


@dataclass(frozen=True, slots=True)
class WebhookOptions:
    """Address on which the webhook listens, and the API server's way to it."""

    port: int = 0
    """Port to listen on; 0: any free one."""
    service: tuple[str, str] | None = None
    """Namespace and name of a Service with port 443; None: by the loopback address."""
    client_authority: str = ""
    """PEM of the authority that signs the API server's client certificate; empty: it uses none."""

    @property
    def host(self) -> str:
        """Return the address to listen on."""
        return "0.0.0.0" if self.service else "127.0.0.1"

    def names(self) -> list[str]:
        """Return the host names in the certificate."""
        if self.service is None:
            return ["127.0.0.1"]
        namespace, name = self.service
        return [f"{name}.{namespace}.svc"]


def service_of(text: str) -> tuple[str, str]:
    """Return namespace and name of `NAMESPACE/NAME`. Raises SpecError for anything else."""
    namespace, slash, name = text.partition("/")
    if not (namespace and slash and name) or "/" in name:
        raise SpecError(f"--webhook-service {text}: must be NAMESPACE/NAME")
    return namespace, name


def configuration(options: WebhookOptions, port: int, trusted: bytes, path: str = PATH) -> Object:
    """Return the registration of the webhook."""
    client: Object = {"caBundle": base64.b64encode(trusted).decode()}
    if options.service is None:
        client["url"] = f"https://127.0.0.1:{port}{path}"
    else:
        namespace, name = options.service
        client["service"] = {"namespace": namespace, "name": name, "path": path, "port": 443}
    rule = {
        "apiGroups": [GROUP],
        "apiVersions": [VERSION],
        "operations": ["CREATE", "UPDATE"],
        "resources": [PLURAL],
        "scope": "Namespaced",
    }
    webhook = {
        "name": f"jobs.{OWN_GROUP}",
        "clientConfig": client,
        "rules": [rule],
        "failurePolicy": "Ignore",
        "matchPolicy": "Equivalent",
        "sideEffects": "None",
        "timeoutSeconds": TIMEOUT_SECONDS,
        "admissionReviewVersions": ["v1"],
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": NAME, "labels": {"app.kubernetes.io/managed-by": "unbroken"}},
        "webhooks": [webhook],
    }


@asynccontextmanager
async def serve_webhook(
    client: KubeClient, options: WebhookOptions, master: bytes
) -> AsyncIterator[str]:
    """Serve the webhook and keep it registered during the block; yield its address.

    `master`: the operator's key, from which the authority of the certificate is derived. Raises
    SpecError if the API server supports no webhooks, WorldError if it cannot listen.
    """
    await _check_api(client)
    try:
        listening = socket.create_server((options.host, options.port), backlog=BACKLOG)
    except OSError as error:
        text = f"the webhook cannot listen on {options.host}:{options.port}: {error}"
        raise WorldError(text) from error
    with listening:
        port = listening.getsockname()[1]
        # All operators of one key have the same path and the same authority.
        path = f"{PATH}/{derive(master, 'webhook-path').hex()}"
        authority = Authority.of(master)
        issue = partial(authority.issue, options.names())
        leaf = issue(wall())
        config = client.config
        file = None if config.fname is None else str(config.fname)
        settings = WebhookSettings(
            listening.fileno(),
            path,
            leaf,
            options.client_authority,
            file,
            None if file is None else config.context_name,
        )
        process = WebhookProcess(listening, settings)
        wanted = configuration(options, port, authority.certificate, path)
        upkeep = _Upkeep(client, wanted, leaf, issue, process.renew)
        async with asyncio.TaskGroup() as tasks:
            work = [tasks.create_task(one.run()) for one in (process, upkeep)]
            try:
                yield f"https://{options.host}:{port}{PATH}"
            finally:
                for task in work:
                    task.cancel()


async def _check_api(client: KubeClient) -> None:
    try:
        await persist("read webhooks", lambda: client.raw("GET", REGISTRATIONS))
    except NotFound as error:
        raise SpecError(
            "this API server takes no webhooks; the local cluster judges jobs by itself when "
            "they are applied: leave --webhook-port out"
        ) from error


class _Upkeep:
    """Keeps the certificate valid, and the API server trusting it."""

    def __init__(
        self,
        client: KubeClient,
        wanted: Object,
        leaf: Leaf,
        issue: Callable[[float], Leaf],
        renewed: Callable[[Leaf], None],
    ) -> None:
        """`wanted`: the registration.  `issue` makes a certificate, which `renewed` takes."""
        self._client = client
        self._wanted = wanted
        self._leaf = leaf
        self._issue = issue
        self._renewed = renewed
        self._queue: WorkQueue[str] = WorkQueue("webhook", self._again)

    async def run(self) -> None:
        """Look at once, whenever the registration changes, and at intervals."""
        self._queue.add(NAME)
        registered = Informer(
            self._client,
            ValidatingWebhookConfiguration,
            fields=f"metadata.name={NAME}",
            on_change=self._changed,
        )
        async with asyncio.TaskGroup() as tasks:
            for program in (registered.run(), self._queue.run()):
                tasks.create_task(program)

    def _changed(self, old: object, new: object) -> None:
        # Not at once: two operators that disagree must not write as fast as they can.
        self._queue.add_after(NAME, SETTLE_SECONDS)

    async def _again(self, _: str) -> float:
        await self.look()
        return LOOK_SECONDS

    async def look(self) -> None:
        """Renew the certificate in time, and register its authority if it is not."""
        now = wall()
        if now >= self._leaf.renewal:
            self._leaf = self._issue(now)
            self._renewed(self._leaf)
        await self._register()

    async def _register(self) -> None:
        wanted = self._wanted
        path = f"{CONFIGURATIONS}/{NAME}"
        result = await self._client.get_or_none(path, Object)
        if result is None:
            await self._client.raw("POST", CONFIGURATIONS, body=wanted)
            log.info("webhook registered", client=_client_of(wanted))
        elif not _includes(result, wanted):
            body = {"metadata": wanted["metadata"], "webhooks": wanted["webhooks"]}
            await self._client.merge(path, body)
            log.info("webhook registered again", client=_client_of(wanted))


def _client_of(wanted: Object) -> str:
    """Return the address that the API server calls, without the path, which is a secret."""
    client = wanted["webhooks"][0]["clientConfig"]
    service = client.get("service")
    return f"{service['namespace']}/{service['name']}" if service else "127.0.0.1"


def _includes(found: object, wanted: object) -> bool:
    """True if all wanted fields are present; the API server adds defaults."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(
            _includes(found.get(key), value) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(found) == len(wanted)
            and all(map(_includes, found, wanted))
        )
    return found == wanted
