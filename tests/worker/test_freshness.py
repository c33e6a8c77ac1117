"""Detection of changes to an imported file, by all ways to change one."""

from __future__ import annotations

import ctypes  # noqa: F401  (what needs it is not done in programs that have not imported it)
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from unbroken.worker.boot.freshness import Freshness
from unbroken.worker.boot.imports import state

Change = Callable[[Path, Path], object]


class Files:
    """Files in a package, a symbolic link, a file with two names, and one below no root."""

    def __init__(self, base: Path) -> None:
        self.root = base / "site-packages"
        package = self.root / "package"
        package.mkdir(parents=True)
        self.module = package / "module.py"
        for path in (self.module, base / "target.py", base / "other.py"):
            path.write_text("x = 1")
        (package / "linked.py").symlink_to(base / "target.py")
        (package / "named.py").hardlink_to(base / "other.py")
        (base / "beside.py").write_text("x = 1")
        self.base, self.looked = base, list[str]()
        plain = [self.module, package / "linked.py", package / "named.py", base / "beside.py"]
        known = {str(path): found for path in plain if (found := state(str(path)))}
        self.fresh = Freshness(known, [f"{self.root}/"], self.look)
        self.looked.clear()

    def look(self, file: str) -> tuple[int, int] | None:
        self.looked.append(Path(file).name)
        return state(file)


def test_only_what_nobody_tells_of_is_looked_at(tmp_path: Path) -> None:
    files = Files(tmp_path)
    assert files.fresh.changed_file() is None
    assert files.looked == ["linked.py", "named.py", "beside.py"]
    (files.root / "package" / "new.py").touch()
    assert files.fresh.changed_file() is None
    assert "module.py" in files.looked
    files.looked.clear()
    assert files.fresh.changed_file() is None
    assert files.looked == ["linked.py", "named.py", "beside.py"]
    files.fresh.close()


def written(module: Path, base: Path) -> None:
    with module.open("r+") as file:
        file.write("x = 22")


def replaced(module: Path, base: Path) -> None:
    (base / "new.py").write_text("x = 3")
    (base / "new.py").rename(module)


def package_replaced(module: Path, base: Path) -> None:
    shutil.copytree(module.parent, base / "copy")
    (base / "copy" / "module.py").write_text("x = 4")
    module.parent.rename(base / "gone")
    (base / "copy").rename(module.parent)


def root_replaced(module: Path, base: Path) -> None:
    root = module.parent.parent
    shutil.copytree(root, base / "copy")
    (base / "copy" / "package" / "module.py").write_text("x = 5")
    root.rename(base / "gone")
    (base / "copy").rename(root)


@pytest.mark.parametrize(
    "change",
    [
        written,
        replaced,
        package_replaced,
        root_replaced,
        lambda module, base: os.utime(module, (1, 1)),
        lambda module, base: module.unlink(),
        lambda module, base: (base / "target.py").write_text("x = 66"),
        lambda module, base: (base / "other.py").write_text("x = 77"),
        lambda module, base: (base / "beside.py").write_text("x = 88"),
    ],
)
def test_every_change_is_noticed_and_stays_known(change: Change, tmp_path: Path) -> None:
    files = Files(tmp_path)
    change(files.module, tmp_path)
    found = files.fresh.changed_file()
    assert found is not None
    assert files.fresh.changed_file() == found
    files.fresh.close()


def test_a_change_before_anybody_watched_is_noticed(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("x = 1")
    fresh = Freshness({str(module): (1, 1)}, [f"{tmp_path}/"], state)
    assert fresh.changed_file() == str(module)
    fresh.close()
