"""The webhook that the API server asks before it stores a job: its server and its registration.

Every operator serves it, not only the one that leads: it decides by the job alone.  Of a pod
template the API server itself is asked, by creating the pod as a dry run.  An operator that is away
delays nobody's job (`failurePolicy: Ignore`): what the webhook would have refused, the operator
refuses in the job's status when it is back.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec
from aiohttp import web
from lightkube import ApiError
from lightkube.resources.admissionregistration_v1 import ValidatingWebhookConfiguration

from unbroken.errors import PeerError, SpecError, WorldError
from unbroken.kube.client import ApiRefusal, KubeClient
from unbroken.kube.clock import wall
from unbroken.kube.informer import Informer
from unbroken.kube.workqueue import WorkQueue
from unbroken.spec.job import GROUP, PLURAL, VERSION
from unbroken.spec.parse import Parsed
from unbroken.spec.problems import Problem, Verdict

from .requests import MERGE, NOT_FOUND, persist
from .webhook_certificates import Authority, Leaf
from .webhook_review import answered, asked, judged, template_problems

log = logging.getLogger(__name__)

Object = dict[str, Any]
NAME = "unbroken-jobs"
"""Of the ValidatingWebhookConfiguration."""
PATH = "/validate"
REGISTRATIONS = "apis/admissionregistration.k8s.io/v1"
CONFIGURATIONS = f"{REGISTRATIONS}/validatingwebhookconfigurations"
TIMEOUT_SECONDS, TRIAL_SECONDS = 10, 5.0
"""What the API server waits (its default), and what asking it back may take."""
BODY_BYTES = 8 << 20
"""Of a review: two objects of at most 1.5 MiB in etcd, as JSON."""
LOOK_SECONDS, SETTLE_SECONDS = 3600.0, 1.0
CLOSING_SECONDS = 2.0
REFUSALS = frozenset({400, 422})
"""Of a pod: its template is at fault, not the place, the quota or the time."""


@dataclass(frozen=True, slots=True)
class WebhookOptions:
    """Where the webhook listens, and how the API server reaches it."""

    port: int = 0
    """0: any that is free."""
    service: tuple[str, str] | None = None
    """Namespace and name of a Service with port 443; None: by the loopback address."""

    @property
    def host(self) -> str:
        """The address to listen on."""
        return "0.0.0.0" if self.service else "127.0.0.1"

    def names(self) -> list[str]:
        """What the API server calls it."""
        if self.service is None:
            return ["127.0.0.1"]
        namespace, name = self.service
        return [f"{name}.{namespace}.svc"]


def service_of(text: str) -> tuple[str, str]:
    """Namespace and name of `NAMESPACE/NAME`; SpecError for anything else."""
    namespace, slash, name = text.partition("/")
    if not (namespace and slash and name) or "/" in name:
        raise SpecError(f"--webhook-service {text}: must be NAMESPACE/NAME")
    return namespace, name


def configuration(options: WebhookOptions, port: int, trusted: bytes) -> Object:
    """The registration of the webhook."""
    client: Object = {"caBundle": base64.b64encode(trusted).decode()}
    if options.service is None:
        client["url"] = f"https://127.0.0.1:{port}{PATH}"
    else:
        namespace, name = options.service
        client["service"] = {"namespace": namespace, "name": name, "path": PATH, "port": 443}
    rule = {
        "apiGroups": [GROUP],
        "apiVersions": [VERSION],
        "operations": ["CREATE", "UPDATE"],
        "resources": [PLURAL],
        "scope": "Namespaced",
    }
    webhook = {
        "name": "jobs.unbroken.dev",
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
    """Serve the webhook and keep it registered during the block; its address.

    `master`: the operator's key, from which the authority of the certificate is derived.
    SpecError where the API server takes no webhooks, WorldError where it cannot listen.
    """
    await _check_api(client)
    upkeep = _Upkeep(client, options, Authority.of(master))
    await persist("webhook=look", upkeep.look)
    application = web.Application(client_max_size=BODY_BYTES)
    application.router.add_post(PATH, _Reviewer(client).review)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=CLOSING_SECONDS)
    await runner.setup()
    try:
        site = web.TCPSite(runner, options.host, options.port, ssl_context=upkeep.tls)
        try:
            await site.start()
        except OSError as error:
            text = f"the webhook cannot listen on {options.host}:{options.port}: {error}"
            raise WorldError(text) from error
        upkeep.port = runner.addresses[0][1]
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(upkeep.run())
            try:
                yield f"https://{options.host}:{upkeep.port}{PATH}"
            finally:
                work.cancel()
    finally:
        await runner.cleanup()


async def _check_api(client: KubeClient) -> None:
    try:
        await persist("read=webhooks", lambda: client.raw("GET", REGISTRATIONS))
    except ApiRefusal as error:
        if error.code != NOT_FOUND:
            raise
        raise SpecError(
            "this API server takes no webhooks; the embedded cluster judges jobs by itself when "
            "they are applied: leave --webhook-port out"
        ) from error


class _Upkeep:
    """Keeps the certificate valid, and the API server trusting it."""

    def __init__(self, client: KubeClient, options: WebhookOptions, authority: Authority) -> None:
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.minimum_version = ssl.TLSVersion.TLSv1_2
        self.port: int | None = None
        """None: nobody listens yet, so nothing is registered."""
        self._client = client
        self._options = options
        self._authority = authority
        self._served: Leaf | None = None
        self._queue: WorkQueue[str] = WorkQueue("webhook", self._again)

    async def run(self) -> None:
        """Look at once, whenever somebody touches the registration, and now and then."""
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
        """Renew the certificate in time, and register its authority where it is not."""
        now = wall()
        if self._served is None or now >= self._served.renewal:
            self._served = leaf = self._authority.issue(self._options.names(), now)
            leaf.load_into(self.tls)
        if self.port is not None:
            await self._register()

    async def _register(self) -> None:
        assert self.port is not None
        wanted = configuration(self._options, self.port, self._authority.certificate)
        found = await self._get(f"{CONFIGURATIONS}/{NAME}")
        if found is None:
            await self._client.raw("POST", CONFIGURATIONS, body=wanted)
            log.info("webhook=registered client=%s", _client_of(wanted))
        elif not _says(found, wanted):
            body = {"metadata": wanted["metadata"], "webhooks": wanted["webhooks"]}
            path = f"{CONFIGURATIONS}/{NAME}"
            await self._client.raw("PATCH", path, body=body, headers=MERGE)
            log.info("webhook=registered_again client=%s", _client_of(wanted))

    async def _get(self, path: str) -> Object | None:
        try:
            found: Object = msgspec.json.decode(await self._client.raw("GET", path))
        except ApiRefusal as error:
            if error.code == NOT_FOUND:
                return None
            raise
        return found


def _client_of(wanted: Object) -> str:
    client = wanted["webhooks"][0]["clientConfig"]
    return str(client.get("url") or client["service"])


def _says(found: object, wanted: object) -> bool:
    """Whether all that is wanted is there; the API server adds defaults."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(
            _says(found.get(key), value) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(found, list) and len(found) == len(wanted) and all(map(_says, found, wanted))
        )
    return found == wanted


class _Reviewer:
    """Answers reviews."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def review(self, request: web.Request) -> web.Response:
        """One AdmissionReview."""
        try:
            question = asked(msgspec.json.decode(await request.read()))
        except (msgspec.DecodeError, PeerError) as error:
            return web.json_response({"error": str(error)[:500]}, status=400)
        verdict, parsed = judged(question)
        if parsed is not None and not verdict.problems:
            problems = await self._tried(question.namespace, parsed)
            verdict = Verdict(problems, verdict.warnings)
        if verdict.problems:
            paths = ",".join(one.path for one in verdict.problems)
            log.info("job=%s/%s refused=%s", question.namespace, _name(question.job), paths)
        return web.json_response(answered(question, verdict))

    async def _tried(self, namespace: str, parsed: Parsed) -> tuple[Problem, ...]:
        """What the API server says of a pod of each template."""
        trials = [self._try(namespace, parsed, n) for n in range(len(parsed.spec.replica_specs))]
        try:
            async with asyncio.timeout(TRIAL_SECONDS):
                found = await asyncio.gather(*trials)
        except (TimeoutError, WorldError, PeerError) as error:
            # Of the rest the operator will know when it makes the pods.
            log.warning('webhook=cannot_try_pods reason="%s"', str(error) or "no answer in time")
            return ()
        return tuple(problem for problems in found for problem in problems)

    async def _try(self, namespace: str, parsed: Parsed, index: int) -> list[Problem]:
        template = parsed.spec.replica_specs[index].template
        given = template.get("metadata") or {}
        kept = {key: given[key] for key in ("labels", "annotations") if key in given}
        metadata = {**kept, "generateName": "unbroken-trial-"}
        head = {"apiVersion": "v1", "kind": "Pod"}
        body = {**head, "metadata": metadata, "spec": template.get("spec")}
        path = f"api/v1/namespaces/{quote(namespace)}/pods"
        try:
            await self._client.raw("POST", path, body=body, parameters={"dryRun": "All"})
        except ApiRefusal as error:
            if error.code not in REFUSALS:
                return []
            return template_problems(index, _causes(error))
        return []


def _causes(error: ApiRefusal) -> list[Object]:
    found = error.__cause__
    details = found.status.details if isinstance(found, ApiError) else None
    causes = (details.causes if details else None) or ()
    told = [{"field": one.field, "message": one.message, "reason": one.reason} for one in causes]
    return told or [{"message": str(error)}]


def _name(job: Any) -> str:
    metadata = job.get("metadata")
    return str(metadata.get("name") or "") if isinstance(metadata, dict) else ""
