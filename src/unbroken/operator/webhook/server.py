"""The server that answers reviews, in a process apart from the operator.

    python -m unbroken.operator.webhook.server    # settings come as JSON lines on stdin

A process, and not a thread, so that a review never delays the leader's loop or its interpreter
lock. The kernel bounds its memory, its computation and its descriptors of half-open connections. It
ends when its stdin does, so it never outlives the operator.

The caller is known by the path, which holds a secret that only the API server gets. If the API
server has a client certificate, it is checked, too.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from urllib.parse import quote

import msgspec
from aiohttp import web
from lightkube import ApiError

from unbroken.errors import PeerError, UnbrokenError, WorldError
from unbroken.kube.client import KubeClient, Object, connect
from unbroken.kube.errors import ApiRefusal
from unbroken.listener import Connections, Limits, admitted
from unbroken.log_lines import LINE_FORM, Log
from unbroken.spec.job.parse import Parsed
from unbroken.spec.problems import Problem, Verdict

from .certificates import Leaf
from .review import JobReview, answered, asked, judged, template_problems

log = Log(__name__)

BODY_BYTES = 7 << 19
"""Bytes of a review (3.5 MiB): two objects of at most 1.5 MiB in etcd, and their envelope."""
REVIEWS_MAX = 8
"""Reviews at a time; others are answered with 503 at once, and the API server continues without."""
REVIEW_SECONDS, JUDGE_SECONDS, TRIAL_SECONDS = 8.0, 3.0, 4.0
"""Seconds of a review (the API server waits for 10 s), of its computation, and of a dry run."""
CONNECTIONS_MAX = 128
"""Connections; beyond, the oldest that has sent no review yet is closed."""
SILENCE_SECONDS = 10.0
"""Seconds after which a connection that has sent no whole review is closed."""
MEMORY_BYTES = 4 << 30
"""Bytes of address space of the process; eight of the largest reviews take about 0.5 GiB."""
DESCRIPTORS = 512
LINE_BYTES = 1 << 20
REFUSALS = frozenset({400, 422})
"""Status codes for a pod whose template is at fault, not the place, the quota or the time."""
ACCESS_REVIEWS = "apis/authorization.k8s.io/v1/subjectaccessreviews"


class WebhookSettings(msgspec.Struct):
    """The first line of stdin."""

    descriptor: int
    """Number of the listening socket."""
    path: str
    """The only path that is answered."""
    leaf: Leaf
    client_authority: str = ""
    """PEM of the authority that signs the API server's client certificate; empty: it uses none."""
    kubeconfig: str | None = None
    context: str | None = None
    silence_seconds: float = SILENCE_SECONDS


class _TooLong(Exception):
    """A review's computation took longer than JUDGE_SECONDS."""


class Reviewer:
    """Answers reviews."""

    def __init__(self, client: KubeClient, path: str) -> None:
        self._client = client
        self._path = path.encode()
        self._active = 0

    async def review(self, request: web.Request) -> web.Response:
        """Answer one AdmissionReview."""
        if not hmac.compare_digest(request.rel_url.raw_path.encode(), self._path):
            return _closed("only the API server is answered", 403)
        if self._active >= REVIEWS_MAX:
            return _closed(f"{REVIEWS_MAX} reviews are being answered; try again", 503)
        self._active += 1
        try:
            async with asyncio.timeout(REVIEW_SECONDS):
                return await self._answer(request)
        except (TimeoutError, _TooLong):
            return _closed(f"no verdict within {REVIEW_SECONDS:g} s", 503)
        except web.HTTPRequestEntityTooLarge:
            return _closed(f"a review has at most {BODY_BYTES} bytes", 413)
        except PeerError as error:
            return _closed(str(error), 400)
        finally:
            self._active -= 1

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        admitted(request)
        with _limited(JUDGE_SECONDS):
            question = asked(body)
            verdict, parsed = judged(question)
        if parsed is not None and not verdict.problems and await self._may_try(question):
            problems = await self._tried(question, parsed)
            verdict = Verdict(problems, verdict.warnings)
        if verdict.problems and self._may_log(question):
            paths = ",".join(problem.path for problem in verdict.problems)[:500]
            log.info("job refused", job=_name(question), problem=paths)
        return web.json_response(answered(question, verdict))

    def _may_log(self, question: JobReview) -> bool:
        """Charge a line of the log to the namespace of a review."""
        return self._client.objects.may_log(question.namespace)

    async def _may_try(self, question: JobReview) -> bool:
        """True if the user may create these pods; then a trial reveals nothing that is not theirs.

        The namespace is the user's claim until the API server has confirmed it.
        """
        wanted = {"namespace": question.namespace, "verb": "create", "resource": "pods"}
        spec = {**question.user, "resourceAttributes": wanted}
        head = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}
        try:
            async with asyncio.timeout(TRIAL_SECONDS):
                said = await self._client.raw("POST", ACCESS_REVIEWS, body={**head, "spec": spec})
            return msgspec.json.decode(said)["status"]["allowed"] is True
        except (TimeoutError, UnbrokenError, msgspec.DecodeError, LookupError, TypeError) as error:
            if self._may_log(question):
                log.warning("pods cannot be tried", error=error)
            return False

    async def _tried(self, question: JobReview, parsed: Parsed) -> tuple[Problem, ...]:
        """Try a pod of each template as a dry run; return the problems that the API server
        found."""
        namespace, count = question.namespace, len(parsed.spec.replica_specs)
        trials = [self._try(namespace, parsed, number) for number in range(count)]
        try:
            async with asyncio.timeout(TRIAL_SECONDS):
                result = await asyncio.gather(*trials)
        except (TimeoutError, WorldError, PeerError) as error:
            # The operator will find the rest when it makes the pods.
            if self._may_log(question):
                log.warning("pods cannot be tried", error=error)
            return ()
        return tuple(problem for problems in result for problem in problems)

    async def _try(self, namespace: str, parsed: Parsed, index: int) -> list[Problem]:
        template = parsed.spec.replica_specs[index].template
        given = template.get("metadata") or {}
        kept = {key: given[key] for key in ("labels", "annotations") if key in given}
        metadata = {**kept, "generateName": "unbroken-trial-"}
        head = {"apiVersion": "v1", "kind": "Pod"}
        body = {**head, "metadata": metadata, "spec": template.get("spec")}
        path = f"api/v1/namespaces/{quote(namespace, safe='')}/pods"
        try:
            await self._client.raw("POST", path, body=body, parameters={"dryRun": "All"})
        except ApiRefusal as error:
            if error.code not in REFUSALS:
                return []
            return template_problems(index, _causes(error))
        return []


def _closed(text: str, status: int) -> web.Response:
    """Return a refusal after which the connection is closed, so that no body is read for it."""
    response = web.json_response({"error": text}, status=status)
    response.force_close()
    return response


def _causes(error: ApiRefusal) -> list[Object]:
    base_exception = error.__cause__
    details = base_exception.status.details if isinstance(base_exception, ApiError) else None
    causes = (details.causes if details else None) or ()
    told = [
        {"field": cause.field, "message": cause.message, "reason": cause.reason} for cause in causes
    ]
    return told or [{"message": str(error)}]


def _name(question: JobReview) -> str:
    metadata = question.job.get("metadata")
    name = str(metadata.get("name") or "") if isinstance(metadata, dict) else ""
    return f"{question.namespace}/{name}"[:500]


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Interrupt the block after `seconds`; in the main thread only."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


# --- life


def _context(settings: WebhookSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    settings.leaf.load_into(context)
    if settings.client_authority:
        context.load_verify_locations(cadata=settings.client_authority)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


async def _serve(lines: asyncio.StreamReader, settings: WebhookSettings) -> None:
    """Answer until stdin ends; each further line is a new certificate."""
    context = _context(settings)
    async with connect(settings.kubeconfig, context=settings.context) as client:
        reviewer = Reviewer(client, settings.path)
        application = web.Application(client_max_size=BODY_BYTES)
        application.router.add_post("/{path:.*}", reviewer.review)
        runner = web.AppRunner(application, shutdown_timeout=1.0)
        await runner.setup()
        assert runner.server is not None
        limits = Limits(CONNECTIONS_MAX, settings.silence_seconds)
        connections = Connections(runner.server, limits, lingering_time=1.0)
        connections.listen(socket.socket(fileno=settings.descriptor), context)
        while line := await lines.readline():
            msgspec.json.decode(line, type=Leaf).load_into(context)
        connections.close()
        await runner.cleanup()


async def _main() -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=LINE_BYTES)
    protocol = asyncio.StreamReaderProtocol(lines)
    await loop.connect_read_pipe(lambda: protocol, sys.stdin)
    first = await lines.readline()
    if first:
        await _serve(lines, msgspec.json.decode(first, type=WebhookSettings))


def main() -> None:
    """Run the process."""
    # A terminal's Ctrl-C is the operator's: this process ends with its stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    logging.basicConfig(level=logging.INFO, format=LINE_FORM)
    asyncio.run(_main())


if __name__ == "__main__":
    main()
