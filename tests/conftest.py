"""Fixtures of all tests: API servers that are started once for each test process."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings

from tests.apiservers import CannotStartError, Cluster, crds_cluster, embedded_cluster, real_cluster
from tests.tiers import TIERS, UNIT, missing, select

# Deadlines and slow draws depend on the load of the machine, and say nothing about the tested code.
# Each run draws the same examples; `make soak`, which runs tests in random order, draws new ones.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("soak", settings.get_profile("tests"), derandomize=False)
settings.load_profile("tests")

_COUNT = itertools.count()
STARTERS = {"real": real_cluster, "crds": crds_cluster, "embedded": embedded_cluster}


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers, and let processes of tests receive SIGINT.

    A shell starts its background commands with SIGINT ignored, and all their children inherit it.
    """
    gc.disable()
    is_shared = hasattr(config, "workerinput") or config.getoption("numprocesses", None)
    if config.getoption("rewrite") and is_shared:
        raise pytest.UsageError("--rewrite runs in one process: leave out -n")
    if config.getoption("random_order_enabled"):
        settings.load_profile("soak")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line(
        "markers", "since(minor, what): needs Kubernetes 1.minor or newer, which brought `what`"
    )
    config.addinivalue_line(
        "markers", "only_real(why): the local cluster does not do this, as its README says"
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that rewrite scripts of tests, and that select a tier."""
    about = "write the effects of the job's machine into tests/core/job/scripts"
    parser.addoption("--rewrite", action="store_true", help=about)
    parser.addoption("--tier", choices=TIERS, help="run the tests of one tier (tests/tiers.py)")
    parser.addoption("--complete", action="store_true", help="with --tier: the heavy ones, too")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give each test a cache of its own: agents keep there what programs import."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = f"{tmp_path_factory.getbasetemp()}/cache-{next(_COUNT)}"
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


def pytest_collection_finish() -> None:
    """Exclude all that was imported and collected from garbage collection.

    Otherwise each collection would look at it again: a quarter of the time of tests in the process.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse a tier that this machine cannot run, instead of skipping its tests."""
    tier = session.config.getoption("tier")
    lack = missing(tier) if tier else None
    if lack:
        raise pytest.UsageError(lack)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tier, and run files first that wait for real processes, so that none runs last."""
    tier = config.getoption("tier")
    if tier:
        chosen = select(items, tier, is_complete=config.getoption("complete"))
        kept = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen
    if not config.getoption("random_order_enabled"):
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test of the tier `unit` that is skipped: what cannot run here belongs elsewhere."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("tier") == UNIT:
        report.outcome = "failed"
        report.longrepr = f"nothing is skipped in `make test`: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Cluster]]:
    """Start a cluster on its first request, and stop all at the end.

    The parametrized fixture does not do that. pytest would stop and start the servers at each
    change of the parameter, which under xdist is twice a file.
    """
    started: dict[str, Cluster] = {}
    failed: dict[str, Exception] = {}
    with ExitStack() as stack:

        def get(name: str) -> Cluster:
            if name not in started and name not in failed:
                folder = tmp_path_factory.mktemp(name)
                try:
                    started[name] = stack.enter_context(STARTERS[name](folder))
                except (CannotStartError, RuntimeError) as error:
                    failed[name] = error
            if name in started:
                return started[name]
            if isinstance(failed[name], CannotStartError):
                pytest.skip(str(failed[name]))
            raise failed[name]

        yield get


@pytest.fixture(params=[pytest.param("real", marks=pytest.mark.realkube), "embedded"])
def cluster(request: pytest.FixtureRequest, clusters: Callable[[str], Cluster]) -> Cluster:
    """Provide each of the two API servers in turn; the test must pass on both.

    With the mark `samples.CUSTOM_RESOURCES` the server of custom resources is a third.
    """
    found = clusters(request.param)
    for mark in request.node.iter_markers("only_real"):
        if not found.is_real:
            pytest.skip(f"the local cluster differs here: {mark.args[0]}")
    for mark in request.node.iter_markers("since"):
        minor, what = mark.args
        if found.minor < minor:
            pytest.skip(f"{found.name} is v1.{found.minor}; {what} came with v1.{minor}")
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run `async def test_*` in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True
