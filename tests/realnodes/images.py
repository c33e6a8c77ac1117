"""The images of deploy/Containerfile, built on this machine without a registry.

buildah executes the file on a base with Debian's own Python, in place of the base that the file
names. In a build, pip has the settings of pip on this machine: certificates, and indexes on its
disk. Nodes get the folder of a containerd that has the images already.
"""

from __future__ import annotations

import ast
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.apiservers import ROOT, CannotStartError

NAMES = {
    "torch": "torch:0.1.0",
    "operator": "unbroken:0.1.0",
    "training": "unbroken-training:0.1.0",
}
"""Names by target, as in deploy/Containerfile.

`torch` has torch, and nothing of the package: it stands for an image of a user.
"""
FILE = ROOT / "deploy/Containerfile"
IGNORED = ROOT / "deploy/Containerfile.dockerignore"
CACHE = Path.home() / ".cache/unbroken-images"
PROGRAMS = ("buildah", "mmdebstrap")
LENT = (
    "io.containerd.content.v1.content/blobs/sha256",
    "io.containerd.snapshotter.v1.overlayfs/snapshots",
)
"""Folders of a containerd from which it only reads parts of an image."""
MIRROR = "http://deb.debian.org/debian"


def _debian(release: str, python: str, *hooks: str, packages: str = "") -> tuple[str, ...]:
    """Return the command that makes a file system with a Python of this version."""
    include = ",".join(filter(None, [f"python{python}", packages]))
    return (
        *("mmdebstrap", "--quiet", "--variant=minbase", f"--include={include}"),
        '--aptopt=Acquire::Check-Valid-Until "false"',  # a mirror may be some weeks behind
        *(f"--customize-hook={hook}" for hook in hooks),
        release,
    )


BASE = _debian(
    "bookworm", "3.11", "ln -s python3.11 $1/usr/bin/python",
    packages="python3.11-venv,ca-certificates",
)  # fmt: skip
"""Command that makes the base. Images of python have the link `python`, too."""
CONDA = "/opt/conda/envs/train"
PYTHONS = {
    "python:3.9": _debian("bullseye", "3.9", "ln -sf python3.9 $1/usr/bin/python3"),
    "python:3.13": _debian("trixie", "3.13", "ln -sf python3.13 $1/usr/bin/python3"),
    "python:3.14": _debian("forky", "3.14", "ln -sf python3.14 $1/usr/bin/python3"),
    "conda:3.11": _debian(
        "bookworm", "3.11", f"mkdir -p $1{CONDA}/bin $1{CONDA}/lib",
        f"mv $1/usr/bin/python3.11 $1{CONDA}/bin/python3",
        f"mv $1/usr/lib/python3.11 $1{CONDA}/lib",
        "rm -rf $1/usr/lib/python3 $1/usr/bin/python*",
    ),
}  # fmt: skip
"""Images of users without torch, by name. That of conda has no other Python than one in a folder of
its own, which only the image's PATH names."""


def store() -> Path:
    """Return the folder of a containerd with the images, unpacked for its snapshotter `overlayfs`.

    It takes some minutes the first time, one or two after a change of the package, then none. Only
    the holder of the machine's control plane may call it, since it removes earlier builds.
    CannotStartError says what is missing.
    """
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        raise CannotStartError(f"images cannot be built; not on the PATH: {', '.join(missing)}")
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = CACHE / f"built-{_digest()}"
    if not folder.exists():
        _build(folder)
    return folder


def lend(source: Path, target: Path) -> None:
    """Make the folder of a containerd with the images of another one, by links."""
    lent = {str(source / name) for name in LENT}
    shutil.copytree(source, target, ignore=lambda place, names: names if place in lent else ())
    for name in LENT:
        for path in (source / name).iterdir():
            (target / name / path.name).symlink_to(path)


def _digest() -> str:
    """Return the digest of all files of which the images are made."""
    made = hashlib.sha256(repr((BASE, PYTHONS)).encode())
    seen = [ROOT / line[1:] for line in IGNORED.read_text().splitlines() if line.startswith("!")]
    for path in sorted([FILE, *_files(seen)]):
        made.update(f"{path.relative_to(ROOT)} {path.stat().st_mode}\n".encode())
        made.update(path.read_bytes())
    return made.hexdigest()[:16]


def _files(places: Iterable[Path]) -> Iterable[Path]:
    for place in places:
        found = place.rglob("*") if place.is_dir() else [place]
        yield from (one for one in found if one.is_file() and "__pycache__" not in one.parts)


def _build(folder: Path) -> None:
    """Build all images into a folder that appears only when it is complete."""
    for old in CACHE.glob("built-*"):
        shutil.rmtree(old)
    _buildah("rm", "--all")  # A build that was interrupted leaves some, whose images stay.
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        made = Path(scratch) / "made"
        base = _file_system(BASE, Path(scratch))
        options = ["--build-arg", f"PYTHON={base}", *_pip(Path(scratch))]
        # The image of torch has a name, so `--prune` keeps it, and torch need not be installed
        # again.
        for target, name in NAMES.items():
            where = ["--file", str(FILE), "--target", target, "--tag", f"localhost/{name}"]
            _buildah("build", "--layers", "--isolation", "chroot", *options, *where, str(ROOT))
        _buildah("rmi", "--prune")
        built = {name: f"localhost/{name}" for name in NAMES.values()}
        built |= {name: _file_system(PYTHONS[name], Path(scratch)) for name in PYTHONS}
        archives = []
        for name, source in built.items():
            archives.append(Path(scratch) / f"{len(archives)}.tar")
            _buildah("push", source, f"docker-archive:{archives[-1]}:{name}")
        _load(made, archives, Path(scratch))
        made.rename(folder)


def _file_system(command: tuple[str, ...], scratch: Path) -> str:
    """Return the name of an image with the file system of a command, and make it if it is
    missing."""
    digest = hashlib.sha256(repr(command).encode()).hexdigest()[:16]
    name = f"localhost/python:{digest}"
    if not _buildah("images", "--quiet", "--filter", f"reference={name}"):
        context = scratch / digest
        context.mkdir()
        subprocess.run([*command, context / "base.tar", MIRROR], check=True, timeout=600)
        path = f"{CONDA}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        lines = ("FROM scratch", "ADD base.tar /", f"ENV PATH={path}", "")
        (context / "Containerfile").write_text("\n".join(lines))
        _buildah("build", "--tag", name, str(context))
    return name


def _pip(scratch: Path) -> list[str]:
    """Return the options of a build in which pip behaves as pip here."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    settings: dict[str, str] = {}
    for place in ("global", "install", ":env:"):  # each comes before the last
        for name, value in re.findall(rf"^{place}\.([\w-]+)=(.*)$", listed, re.MULTILINE):
            settings[name] = ast.literal_eval(value)
    lines = [f"{name} = {' '.join(value.split())}\n" for name, value in settings.items()]
    config = scratch / "pip.conf"
    config.write_text("".join(["[global]\n", *lines]))
    mounted = {"/etc/pip.conf": config}
    for word in " ".join(settings.values()).split():
        # The files to which an index on the disk refers are next to it.
        is_index, path = word.startswith("file://"), Path(word.removeprefix("file://"))
        path = path.parent if is_index else path
        if path.is_absolute() and path.exists():
            mounted[str(path)] = path
    return [f"--volume={source}:{target}:ro" for target, source in mounted.items()]


def _buildah(*arguments: str) -> str:
    """Run buildah; return its output. Its error output is in the cache's `buildah.log`."""
    where = ["--root", CACHE / "storage", "--runroot", CACHE / "run", "--storage-driver", "overlay"]
    with (CACHE / "buildah.log").open("ab") as log:
        command = ["buildah", *where, *arguments]
        done = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, stderr=log, timeout=1200
        )
    assert done.returncode == 0, f"buildah {' '.join(arguments)}: see {log.name}"
    return done.stdout.decode()


def _load(made: Path, archives: Iterable[Path], scratch: Path) -> None:
    """Let a containerd of its own make the folder from archives."""
    address, config = scratch / "containerd.sock", scratch / "containerd.toml"
    config.write_text('version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n')
    places = ["--config", config, "--root", made, "--state", scratch / "state"]
    with (scratch / "containerd.log").open("wb") as log:
        command = ["containerd", *places, "--address", address]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for archive in archives:
            client = ["ctr", "--connect-timeout", "60s", "-a", address, "-n", "k8s.io"]
            command = [*client, "images", "import", "--snapshotter", "overlayfs", archive]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
    finally:
        process.terminate()
        process.wait(timeout=60)
