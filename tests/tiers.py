"""Tiers of tests: what each target of the Makefile runs, and what it needs on the machine.

A test belongs to exactly one tier. `tier_of` decides by its markers and its folder:

| tier | target | tests |
|---|---|---|
| unit | make test | no real time, and one real process test for each promise (marker `smoke`) |
| processes | make test-processes | real agents, workers and local clusters |
| kube | make test-kube | a real control plane |
| clients | make test-clients | programs of others, and the commands of the documents |
| attack | make test-attack | floods and long fuzzing |
| frameworks | make test-frameworks | Ray, Trainers, trackers, in environments of their own |
| nodes | make test-nodes | real kubelets and containers |
| gpu | make test-gpu | GPUs of this machine |
| browser | make test-ui | the live page in a real Chromium |

Tests with the marker `heavy` run with ALL=1 only.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.apiservers import CannotStartError, envtest_folder

UNIT = "unit"
TIERS = (UNIT, "processes", "kube", "clients", "attack", "frameworks", "nodes", "gpu", "browser")
FOLDERS = {
    "realnodes": "nodes",
    "gpu": "gpu",
    "browser": "browser",
    "clients": "clients",
    "interop": "clients",
    "documents": "clients",
}
"""Tier of all slow tests below a folder of `tests`."""
DECISIVE_MARKERS = ("frameworks", "clients")
"""Markers that decide the tier wherever the test is."""
ROOT = Path(__file__).parents[1]
FRAMEWORKS_ENV = Path(
    os.environ.get("UNBROKEN_FRAMEWORKS_ENV") or ROOT / ".frameworks-env"
).absolute()
TRACKERS_ENV = Path(os.environ.get("UNBROKEN_TRACKERS_ENV") or ROOT / ".trackers-env").absolute()
CONTROL_PLANE = {"etcd": "etcd-server", "zstd": "zstd", "openssl": "openssl"}
REAL_NODES = {
    **CONTROL_PLANE,
    **{"containerd": "containerd", "runc": "runc", "ip": "iproute2", "iptables": "iptables"},
    **{"gcc": "gcc", "buildah": "buildah", "mmdebstrap": "mmdebstrap"},
}
BROWSER = {"node": "nodejs", "npm": "npm", "chromium": "chromium"}
MONITORING = {
    **{"prometheus": "prometheus", "promtool": "prometheus"},
    "prometheus-node-exporter": "prometheus-node-exporter",
}
PROGRAMS: dict[str, dict[str, str]] = {
    "kube": CONTROL_PLANE,
    "nodes": REAL_NODES,
    "browser": BROWSER,
    "clients": MONITORING,
}
"""Programs that a tier needs, with Debian's package of each."""


def tier_of(item: pytest.Item) -> str:
    """Return the tier of a test."""

    def marked(name: str) -> bool:
        return item.get_closest_marker(name) is not None

    if marked("smoke"):
        return UNIT
    folder = item.path.relative_to(ROOT / "tests").parts[0]
    slow = marked("slow") or marked("heavy")
    if FOLDERS.get(folder) in ("nodes", "gpu", "browser") and slow:
        return FOLDERS[folder]
    if marked("realkube"):
        return "kube"
    for name in DECISIVE_MARKERS:
        if marked(name):
            return name
    if marked("flood") or (folder == "attack" and slow):
        return "attack"
    return FOLDERS.get(folder, "processes") if slow else UNIT


def select(items: list[pytest.Item], tier: str, *, is_complete: bool) -> list[pytest.Item]:
    """Return the tests of a tier; `is_complete`: with those marked `heavy`."""
    chosen = [item for item in items if tier_of(item) == tier and not _never_runs(item)]
    if is_complete:
        return chosen
    return [item for item in chosen if item.get_closest_marker("heavy") is None]


def _never_runs(item: pytest.Item) -> bool:
    """Return True for the local cluster's form of a test that only a real one can pass."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    is_local = "embedded" in parameters.values()
    return is_local and item.get_closest_marker("only_real") is not None


def missing(tier: str) -> str | None:
    """Return what this machine lacks for a tier, with what to do, in one line; None if nothing."""
    absent = [package for name, package in PROGRAMS.get(tier, {}).items() if not shutil.which(name)]
    lacks = list(dict.fromkeys(absent))
    if lacks:
        target = "test-ui" if tier == "browser" else f"test-{tier}"
        return f"make {target} needs Debian's {', '.join(lacks)}: apt-get install {' '.join(lacks)}"
    check = _CHECKS.get(tier)
    return check() if check else None


def _control_plane() -> str | None:
    try:
        envtest_folder()
    except CannotStartError as error:
        return f"make test-kube needs the programs of a control plane: {error}"
    return None


def _root_and_control_plane() -> str | None:
    if os.geteuid() != 0:
        return "make test-nodes needs root: it makes network namespaces and a bridge"
    return _control_plane()


def _clients() -> str | None:
    if not shutil.which("kubectl") and not (ROOT / ".venv/bin/kubectl").exists():
        return "make test-clients needs kubectl on the PATH; `make setup` installs it"
    return None


def _frameworks() -> str | None:
    given = os.environ.get("UNBROKEN_RAY_ENV") or ROOT / ".ray-env"
    if not (Path(given) / "bin/ray").exists():
        return f"make test-frameworks needs Ray in {given}: make ray-env, or set UNBROKEN_RAY_ENV"
    if not (FRAMEWORKS_ENV / "bin/accelerate").exists():
        what = f"make test-frameworks needs Trainers and Accelerate in {FRAMEWORKS_ENV}"
        return f"{what}: make frameworks-env, or set UNBROKEN_FRAMEWORKS_ENV"
    if not (TRACKERS_ENV / "bin/mlflow").exists():
        what = f"make test-frameworks needs MLflow and Weights & Biases in {TRACKERS_ENV}"
        return f"{what}: make trackers-env, or set UNBROKEN_TRACKERS_ENV"
    return None


def _gpu() -> str | None:
    if importlib.util.find_spec("torch") is None or not Path("/dev/nvidia0").exists():
        return "make test-gpu needs a GPU of NVIDIA (/dev/nvidia0) and torch with CUDA"
    return None


def _browser() -> str | None:
    if importlib.util.find_spec("playwright") is None or not (ROOT / "ui/node_modules").exists():
        return "make test-ui needs Playwright and the packages of ui/: it installs both"
    return None


_CHECKS: dict[str, Callable[[], str | None]] = {
    "kube": _control_plane,
    "nodes": _root_and_control_plane,
    "clients": _clients,
    "frameworks": _frameworks,
    "gpu": _gpu,
    "browser": _browser,
}
