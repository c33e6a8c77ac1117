"""Build the source distribution and the wheel of the last commit, the same bytes each time.

    python tools/dist.py [FOLDER]     # default: build/dist

The packages are built in a fresh clone, so that files that are not committed cannot be in them. The
wheel is built from the source distribution. Every time in them is that of the commit, or
SOURCE_DATE_EPOCH. The same commit gives the same bytes with the same versions of setuptools and
wheel (requirements.lock) and of zlib.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEFAULT = ROOT / "build/dist"
EPOCH = "SOURCE_DATE_EPOCH"


def build(folder: Path, repository: Path = ROOT) -> list[Path]:
    """Build both from the last commit of the repository into a folder; their paths, wheel first."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("unbroken-*.tar.gz"), *folder.glob("unbroken-*.whl")):
        old.unlink()
    before = os.umask(0o022)  # wheels hold the modes of files
    try:
        with tempfile.TemporaryDirectory(prefix="unbroken-dist-") as name:
            clone = Path(name) / "unbroken"
            _run("git", "clone", "--quiet", str(repository), str(clone))
            epoch = os.environ.get(EPOCH) or _run(
                "git", "-C", str(clone), "log", "-1", "--format=%ct"
            )
            made = Path(name) / "dist"
            words = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(made))
            _run(*words, str(clone), epoch=epoch)
            (sdist,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
            settle(sdist, int(epoch))
            return [Path(shutil.copy(one, folder)) for one in (wheel, sdist)]
    finally:
        os.umask(before)


def settle(path: Path, epoch: int) -> None:
    """Write a compressed tar file again, without what depends on the machine, user and time."""
    made = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=made, mode="w") as new:
        for member in sorted(old.getmembers(), key=lambda one: one.name):
            data = old.extractfile(member) if member.isfile() else None
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, data)
    with (
        path.open("wb") as file,
        gzip.GzipFile("", "wb", compresslevel=9, fileobj=file, mtime=epoch) as zipped,
    ):
        zipped.write(made.getvalue())


def _run(*words: str, epoch: str | None = None) -> str:
    environment = {**os.environ, EPOCH: epoch} if epoch else None
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


if __name__ == "__main__":
    for built in build(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT):
        print(built)
