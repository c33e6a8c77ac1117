"""Starts the API servers that contracts hold for: a real one, the embedded one, a newer one of
custom resources alone.

The real one is a kube-apiserver over etcd, without controllers and without a scheduler, so that
nothing but the server itself changes what a test has written.  Its admission plugin
`ServiceAccount` is off for the same reason: it waits for what a controller would make.  It is
v1.20.2, or the version that the folder `ENVTEST_BINARIES` holds; tests ask `Cluster.minor`.

The third serves CustomResourceDefinitions and what they define, by the code of v1.36.4, and no
other kind: there are no namespaces, any name will do, and everybody may do everything.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import IO

import yaml

ROOT = Path(__file__).parent.parent
START_SECONDS = 90
"""Seconds in which an API server must answer after its start; a busy machine needs most of them."""
TOKEN = "contract-token"


class CannotStartError(Exception):
    """A program or library that a cluster needs is missing here; the text says which."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running API server and how to reach it."""

    name: str
    url: str
    token: str
    ca: str
    """Certificates to trust, as PEM text; empty for plain HTTP."""
    kubeconfig: Path
    minor: int
    """Minor version that the server reports: 20 for v1.20.2."""
    process: subprocess.Popen[str] | subprocess.Popen[bytes]
    etcd: subprocess.Popen[bytes] | None = None
    """Process of etcd, which only a real server has."""

    @property
    def is_real(self) -> bool:
        """True for servers that are built from the source of Kubernetes."""
        return self.name != "embedded"

    @property
    def has_built_in_kinds(self) -> bool:
        """True if there are namespaces, pods and the others that no definition makes."""
        return self.name != "crds"

    @property
    def headers(self) -> dict[str, str]:
        """Headers that authenticate a request."""
        return {"Authorization": f"Bearer {self.token}"}


def envtest_folder() -> Path:
    """Return the folder of the scripts and binaries. CannotStartError says what is missing."""
    folder = Path(os.environ.get("UNBROKEN_ENVTEST", ROOT.parent / "shared/envtest"))
    if not (folder / "kube-apiserver.zst").exists():
        raise CannotStartError(f"no kube-apiserver.zst in {folder} (set UNBROKEN_ENVTEST)")
    missing = [name for name in ("etcd", "zstd", "openssl") if not shutil.which(name)]
    if missing:
        raise CannotStartError(f"not on the PATH: {', '.join(missing)}")
    return folder


def unpacked(name: str) -> Path:
    """Return the path of a binary of Kubernetes, unpacked once for all test processes.

    The search begins where ENVTEST_BINARIES points, then in `envtest_folder`, packed or not.
    CannotStartError if neither has it.
    """
    places = (Path(os.environ.get("ENVTEST_BINARIES", envtest_folder())), envtest_folder())
    found = (one / file for one in places for file in (name, f"{name}.zst"))
    packed = next((one.resolve() for one in found if one.exists()), None)
    if packed is None:
        raise CannotStartError(f"no {name}.zst in {envtest_folder()}")
    if packed.name == name:
        return packed
    # Binaries of different versions have the same names.
    place = hashlib.sha256(str(packed.parent).encode()).hexdigest()[:8]
    folder = Path(tempfile.gettempdir()) / "unbroken-envtest" / place
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists() or target.stat().st_mtime < packed.stat().st_mtime:
            part = target.with_suffix(".part")
            subprocess.run(["zstd", "-q", "-d", "-f", packed, "-o", part], check=True)
            part.chmod(0o755)
            os.utime(part)
            part.rename(target)
    return target


@contextmanager
def real_cluster(folder: Path, options: Sequence[str] = ()) -> Iterator[Cluster]:
    """Run etcd and kube-apiserver, with further `options`, in `folder` until the block ends."""
    binary = unpacked("kube-apiserver")
    etcd, peer, port = free_ports(3)
    (folder / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
    key = folder / "sa.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    with ExitStack() as stack:
        store = stack.enter_context(
            _running(_etcd_command(folder, etcd, peer), folder / "etcd.log")
        )
        command = [*_apiserver_command(binary, folder, etcd, port), *options]
        process = stack.enter_context(_running(command, folder / "apiserver.log"))
        url = f"https://127.0.0.1:{port}"
        _wait_ready(url, process, folder / "apiserver.log")
        ca = (folder / "certs/apiserver.crt").read_text()
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(kubeconfig_of(url, ca, TOKEN))
        minor = minor_version(url, ca)
        yield Cluster("real", url, TOKEN, ca, kubeconfig, minor, process, store)


@contextmanager
def crds_cluster(folder: Path) -> Iterator[Cluster]:
    """Run etcd and the server of custom resources in `folder` until the block ends."""
    binary = unpacked("crd-server")
    etcd, peer, port = free_ports(3)
    command = [
        *(str(binary), f"--etcd-servers=http://127.0.0.1:{etcd}", "--bind-address=127.0.0.1"),
        *(f"--secure-port={port}", f"--cert-dir={folder / 'certs'}"),
    ]
    log = folder / "crd-server.log"
    with (
        _running(_etcd_command(folder, etcd, peer), folder / "etcd.log") as store,
        _running(command, log) as process,
    ):
        url = f"https://127.0.0.1:{port}"
        _wait_ready(url, process, log)
        ca = (folder / "certs/apiserver.crt").read_text()
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(kubeconfig_of(url, ca, TOKEN))
        minor = minor_version(url, ca)
        yield Cluster("crds", url, TOKEN, ca, kubeconfig, minor, process, store)


@contextmanager
def embedded_cluster(folder: Path, port: int = 0) -> Iterator[Cluster]:
    """Run the local API server on `folder` until the block ends."""
    module = "unbroken.local.apiserver"
    if util.find_spec(module) is None or util.find_spec(f"{module}.__main__") is None:
        raise CannotStartError(f"{module} is not there yet")
    command = [sys.executable, "-m", module, "--dir", str(folder), "--port", str(port)]
    log = folder.with_name(folder.name + ".log")
    with open(log, "a") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().split(maxsplit=1)
        if not line or line[0] != "ready":
            raise RuntimeError(f"embedded API server said {line}:\n{log.read_text()[-4000:]}")
        yield _embedded(Path(line[1].strip()), process)
    finally:
        _stop(process)
        if process.stdout is not None:
            process.stdout.close()


def _embedded(kubeconfig: Path, process: subprocess.Popen[str]) -> Cluster:
    config = yaml.safe_load(kubeconfig.read_text())
    place = config["clusters"][0]["cluster"]
    ca = base64.b64decode(place.get("certificate-authority-data", "")).decode()
    token = config["users"][0]["user"]["token"]
    minor = minor_version(place["server"], ca)
    return Cluster("embedded", place["server"], token, ca, kubeconfig, minor, process)


def minor_version(url: str, ca: str) -> int:
    """Return the minor version of a server, by its release name, which all servers have."""
    trusted = ssl.create_default_context(cadata=ca) if ca else None
    with urllib.request.urlopen(f"{url}/version", timeout=20, context=trusted) as answer:
        release: str = json.load(answer)["gitVersion"]
    found = re.match(r"v1\.(\d+)\.", release)
    if found is None:
        raise RuntimeError(f"{url}/version: gitVersion must begin with v1.N., not {release!r}")
    return int(found[1])


def _etcd_command(folder: Path, client: int, peer: int) -> list[str]:
    host = "http://127.0.0.1"
    return [
        *("etcd", "--data-dir", str(folder / "etcd-data"), "--unsafe-no-fsync"),
        *("--listen-client-urls", f"{host}:{client}"),
        *("--advertise-client-urls", f"{host}:{client}"),
        *("--listen-peer-urls", f"{host}:{peer}"),
        *("--initial-advertise-peer-urls", f"{host}:{peer}"),
        *("--initial-cluster", f"default={host}:{peer}"),
    ]


def _apiserver_command(binary: Path, folder: Path, etcd: int, port: int) -> list[str]:
    return [
        str(binary),
        f"--etcd-servers=http://127.0.0.1:{etcd}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={folder / 'certs'}",
        "--service-cluster-ip-range=10.96.0.0/16",
        f"--service-account-key-file={folder / 'sa.key'}",
        f"--service-account-signing-key-file={folder / 'sa.key'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--authorization-mode=RBAC",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--allow-privileged=true",
        "--disable-admission-plugins=ServiceAccount",
    ]


def kubeconfig_of(url: str, ca: str, token: str) -> str:
    """Return the text of a kubeconfig."""
    authority = base64.b64encode(ca.encode()).decode()
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "contract",
            "contexts": [{"name": "contract", "context": {"cluster": "here", "user": "admin"}}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "clusters": [
                {
                    "name": "here",
                    "cluster": {"server": url, "certificate-authority-data": authority},
                }
            ],
        }
    )


def free_port() -> int:
    """Return a port of this machine on which nothing listens."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return ports that are free now. All are held while the others are looked for."""
    with ExitStack() as stack:
        ports = []
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            ports.append(int(one.getsockname()[1]))
        return ports


@contextmanager
def _running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    output: IO[bytes]
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        # An API server with open watches takes its time, and its state is thrown away here.
        process.kill()
        process.wait()


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Poll kube-apiserver until it is ready, since it sends no sign of that."""
    trusting = ssl.create_default_context()
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    asked = urllib.request.Request(f"{url}/readyz", headers={"Authorization": f"Bearer {TOKEN}"})
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(asked, timeout=5, context=trusting):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            time.sleep(0.1)
    raise RuntimeError(f"kube-apiserver is not ready:\n{log.read_text()[-4000:]}")
