"""Make a folder with the agent and a Python of its own, which runs from any path in any image.

    python relocatable.py FOLDER

Run it with a Python that has `unbroken` installed.  The folder holds the interpreter, the standard
library, the agent's packages, every shared library that these need, and the loader for them.
So it needs nothing of the image it runs in, neither a C library nor a shell:

    FOLDER/lib/loader --library-path FOLDER/lib FOLDER/bin/python3 -I -S -u FOLDER/run.py ARGS...

`FOLDER/library` holds only the package `unbroken`, for the Python of the workers.
"""

from __future__ import annotations

import compileall
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import unbroken

DISTRIBUTIONS = ("aiohttp", "google-re2", "msgspec", "py-spy")
"""Packages that the agent imports or starts; those that they require are taken, too."""
PARTS = (
    *("__init__.py", "errors.py", "agent", "agent_http", "budget.py", "core", "listener.py"),
    *("foreign_numbers.py", "log_lines.py", "runtime", "typed_fields.py"),
    *("spec", "wire", "worker"),
)
"""Parts of `unbroken` that the agent and the workers import."""
LEFT_OUT = (
    *("__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter"),
    *("turtledemo", "ensurepip", "lib2to3", "pydoc_data", "distutils", "config-*", "*.a", "*.h"),
    *("*.pyx", "*.pxd", "*.c", "curses", "sqlite3", "dbm", "unittest", "_tkinter.*", "_curses*"),
    *("_sqlite3.*", "_ssl.*", "_dbm.*", "_gdbm.*", "readline.*", "nis.*", "ossaudiodev.*"),
    *("_test*", "_xx*", "_ctypes_test*"),
)
"""Names of files and folders that no agent needs."""
RUN = '''"""Run the agent of this folder; the arguments are the command of the container."""

import sys

folder = __file__.rpartition("/")[0]
sys.path[:0] = [f"{folder}/library", f"{folder}/packages"]

from unbroken.agent.injected import script

script(f"{folder}/library", folder.rpartition("/")[0])
'''


def make(folder: Path) -> None:
    """Fill a folder that does not exist yet."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = folder / "lib" / version
    _copy(Path(sysconfig.get_path("stdlib")), library)
    modules = Path(sysconfig.get_config_var("DESTSHARED"))
    if modules.is_dir() and not (library / modules.name).is_dir():
        _copy(modules, library / modules.name)
    (folder / "bin").mkdir()
    shutil.copy(sys.executable, folder / "bin/python3")
    for name in sorted(_closure(DISTRIBUTIONS)):
        _install(name, folder)
    own = Path(unbroken.__file__).parent
    (folder / "library/unbroken").mkdir(parents=True)
    for part in PARTS:
        _copy(own / part, folder / "library/unbroken" / part)
    _add_libraries(folder)
    (folder / "run.py").write_text(RUN)
    # Unchecked: a copy's files are newer than what was compiled of them.
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    for place in (library, folder / "packages", folder / "library"):
        if not compileall.compile_dir(place, quiet=1, invalidation_mode=unchecked, stripdir=folder):
            raise SystemExit(f"{place}: a module cannot be compiled")


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        ignored = shutil.ignore_patterns(*LEFT_OUT)
        shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def _closure(names: Iterable[str]) -> set[str]:
    """The distributions and those that they require on this Python, without extras."""
    found: set[str] = set()
    waiting = [*names]
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        for line in metadata.requires(name) or ():
            requirement, _, marker = line.partition(";")
            if "extra ==" in marker or not _is_met(marker):
                continue
            if match := re.match(r"[\w.-]+", requirement):
                waiting.append(match[0])
    return found


def _is_met(marker: str) -> bool:
    """True if a marker is about a newer Python than this one, or about none: a package too many
    harms nobody.  Requirements of other systems and of older Pythons are not installed here."""
    old = re.search(r'python_version\s*<\s*"3\.(\d+)"', marker)
    other = re.search(r'(sys_platform|platform_system)\s*==\s*"(win32|Windows|darwin)"', marker)
    return other is None and (old is None or sys.version_info.minor < int(old[1]))


def _install(name: str, folder: Path) -> None:
    """Copy the files of an installed distribution: modules, and programs without an interpreter."""
    found = metadata.distribution(name)
    for file in found.files or ():
        source = Path(str(found.locate_file(file))).resolve()
        if "__pycache__" in file.parts or not source.is_file():
            continue
        if ".." not in file.parts:
            _copy(source, folder / "packages" / file)
        elif source.parent.name == "bin" and _is_binary(source):
            _copy(source, folder / "bin" / source.name)


def _is_binary(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(4) == b"\x7fELF"


def _add_libraries(folder: Path) -> None:
    """Copy the shared libraries that the interpreter and all modules need, and the loader."""
    modules = [folder / "bin/python3", *folder.rglob("*.so"), *folder.rglob("*.so.*")]
    loaders = set()
    for module in modules:
        done = subprocess.run(["ldd", module], check=True, capture_output=True, text=True)
        for line in done.stdout.splitlines():
            if "not found" in line:
                raise SystemExit(f"{module}: {line.strip()}")
            if match := re.match(r"\s*(\S+) => (/\S+) \(", line):
                library = Path(match[2])
                if folder.resolve() not in library.resolve().parents:
                    _copy(library, folder / "lib" / match[1])
            elif match := re.match(r"\s*(/\S+) \(", line):
                loaders.add(Path(match[1]))
    (loader,) = loaders
    _copy(loader, folder / "lib" / loader.name)
    (folder / "lib/loader").symlink_to(loader.name)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
