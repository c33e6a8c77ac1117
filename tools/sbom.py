"""Write a CycloneDX SBOM of the Python packages in the operator's image.

    python tools/sbom.py CYCLONEDX [FOLDER]     # default: build/sbom

An environment is made with the steps of deploy/Containerfile: the packages of
deploy/requirements.lock, and the wheel of the last commit.  The program CYCLONEDX (`cyclonedx-py`)
reads it, so that versions, licences and the graph of dependencies are those that are installed.
The image's Debian packages are not in the SBOM; the release workflow has them from buildx.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from dist import ROOT, build

DEFAULT = ROOT / "build/sbom"
LOCK = ROOT / "deploy/requirements.lock"
NOT_IN_THE_IMAGE = ("setuptools", "pip")
"""Packages that the Containerfile removes at its end."""


def write(cyclonedx: str, folder: Path) -> Path:
    """Write the SBOM into a folder; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unbroken-sbom-") as name:
        wheel = build(Path(name) / "dist")[0]
        venv.create(Path(name) / "image", with_pip=True)
        python = Path(name) / "image/bin/python"
        pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
        _run(*pip, "install", "--require-hashes", "--requirement", LOCK)
        # By name, because pip records the path of a file, and the SBOM would show it.
        offline = ("--no-deps", "--no-index", "--find-links", wheel.parent)
        _run(*pip, "install", *offline, f"unbroken=={wheel.name.split('-')[1]}")
        _run(*pip, "uninstall", "--yes", *NOT_IN_THE_IMAGE)
        made = folder / f"{'-'.join(wheel.name.split('-')[:2])}-operator.cdx.json"
        options = ("--spec-version", "1.6", "--output-reproducible", "--validate")
        _run(cyclonedx, "environment", *options, "--output-file", made, python)
    return made


def _run(*words: str | Path) -> None:
    # The times in the SBOM are those of the commit, as in the packages.
    log = ("git", "-C", str(ROOT), "log", "-1", "--format=%ct")
    epoch = subprocess.run(log, capture_output=True, text=True, check=True).stdout.strip()
    environment = {"SOURCE_DATE_EPOCH": epoch, **os.environ}
    line = [str(word) for word in words]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(line)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    print(write(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else DEFAULT))
