"""A template's imports, the modules it leaves out, and the cases in which it parks no worker."""

from __future__ import annotations

import shutil
import socket
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.worker.templates import SEEN, Ended, Template, plainly, user_packages, user_template
from unbroken.agent.evidence import procfs
from unbroken.agent.workers.learned import state

pytestmark = pytest.mark.slow
THREAD = """import threading
threading.Thread(target=threading.Event().wait, daemon=True, name='{}').start()"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Return a directory that the template takes for site-packages: one user's."""
    return user_packages(tmp_path)


def imported(packages: Path, modules: dict[str, str], **variables: str) -> dict[str, Any]:
    """Return the template's answer; `kept` lists what a worker of it finds imported."""
    for name, text in modules.items():
        (packages / f"{name}.py").write_text(text)
    with user_template(packages, **variables) as ours:
        answer = ours.prepare(*modules)
        if answer["type"] == "ready":
            ended = ours.run()
            assert (ended.code, ended.stderr) == (0, "")
            answer["kept"] = ended.stdout.split()
    answer["printed"] = ours.printed
    return answer


@pytest.mark.parametrize(
    "text",
    [
        "import os; os.environ.get('RANK')",
        "import os; os.environ['LOCAL_RANK']",
        "import os; os.getenv('WORLD_SIZE', '1')",
        "from os import environ\ntry: 'MASTER_ADDR' in environ\nexcept Exception: pass",
        "import os\nclass A:\n    port = os.environ.setdefault('MASTER_PORT', '1')",
        "import modlib; modlib.rank()",
    ],
)
def test_who_reads_a_rank_is_left_out_with_its_importers(text: str, packages: Path) -> None:
    modules = {
        "modlib": "import os\ndef rank(): return os.environ.get('RANK')",
        "modouter": "import modbad",
        "modbad": text,
        "modlate": "try:\n    import modbad\nexcept Exception: pass",
        "modcopy": "import os; dict(os.environ); os.environ.copy(); [*os.environ]",
        "modhome": "import os; os.environ.get('HOME')",
    }
    answer = imported(packages, modules)
    assert answer["kept"] == ["modlib", "modcopy", "modhome"]
    assert answer["modules"] == len(answer["kept"])
    assert {*answer["skipped"]} == {"modouter", "modbad", "modlate"}
    assert "is read while it is imported" in answer["skipped"]["modbad"]


def test_what_was_found_is_told_so_that_another_template_needs_no_trial(packages: Path) -> None:
    trace = packages / "trace"
    modules = {
        "modlib": "",
        "modouter": "import modbad",
        "modbad": f"open({str(trace)!r}, 'a').write('x')\nimport os; os.environ.get('RANK')",
    }
    with user_template(packages) as first:
        for name, text in modules.items():
            (packages / f"{name}.py").write_text(text)
        first.prepare(*modules)
    assert {*first.found["left_out"]} == {"modouter", "modbad"}
    for name in modules:
        file = packages / f"{name}.py"
        assert first.found["files"][str(file)] == state(str(file))
    before = trace.read_text()
    shutil.rmtree(packages.parents[2].parent / "program")
    with user_template(packages) as second:
        answer = second.prepare(*modules, left_out=first.found["left_out"])
        assert (answer["type"], {*answer["skipped"]}) == ("ready", {"modouter", "modbad"})
        assert second.run().stdout == "modlib\n"
    assert trace.read_text() == before
    assert second.found["left_out"] == first.found["left_out"]


def test_many_files_are_told_in_several_messages(packages: Path) -> None:
    names = [f"mod{'x' * 200}{number}" for number in range(150)]
    for name in names:
        (packages / f"{name}.py").write_text("")
    with user_template(packages) as ours:
        assert ours.prepare(*names)["modules"] == len(names)
        assert {str(packages / f"{name}.py") for name in names} <= {*ours.found["files"]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (THREAD.format("pump"), "has started threads: pump"),
        ("import socket; listening = socket.socket()", "holds a socket"),
        ("import os; ends = os.pipe()", "holds a pipe"),
        ("import select; poll = select.epoll()", "holds a [eventpoll]"),
        ("import subprocess; p = subprocess.Popen(['sleep', '100'])", "has started a process"),
        ("import os; os.chdir('/')", "has changed the directory to /"),
    ],
)
def test_what_a_fork_would_share_is_left_out_and_undone(
    text: str, reason: str, packages: Path
) -> None:
    modules = {"modfirst": "", "modouter": "import modbad", "modbad": text, "modlast": ""}
    answer = imported(packages, modules)
    assert answer["kept"] == ["modfirst", "modlast"]
    assert {*answer["skipped"]} == {"modouter", "modbad"}
    assert answer["skipped"]["modbad"].startswith(reason)


NAMED = """
import ctypes, _thread
named, ever = _thread.allocate_lock(), _thread.allocate_lock()
named.acquire(), ever.acquire()
def run():
    ctypes.CDLL(None).prctl(15, b"{}")  # PR_SET_NAME
    named.release()
    ever.acquire()
_thread.start_new_thread(run, ())
named.acquire()
"""


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (NAMED.format("jemalloc_bg_thd"), ["modfirst", "modnative", "modlast"]),
        (NAMED.format("jemalloc"), ["modfirst", "modlast"]),
        (THREAD.format("jemalloc_bg_thd"), ["modfirst", "modlast"]),
    ],
)
def test_threads_that_a_child_does_without_forbid_no_fork(
    text: str, kept: list[str], packages: Path
) -> None:
    answer = imported(packages, {"modfirst": "", "modnative": text, "modlast": ""})
    assert answer["kept"] == kept


def test_modules_that_fail_are_left_out_with_the_reason(packages: Path) -> None:
    modules = {
        "modraises": "1 / 0",
        "modexits": "import sys; sys.exit('no')",
        "modstops": "raise KeyboardInterrupt",
        "modneeds": "import absent_module",
        "modbroken": "def (",
        "modlast": "print('noise'); import sys; print('noise', file=sys.stderr)",
    }
    answer = imported(packages, modules)
    assert answer["kept"] == ["modlast"]
    assert answer["printed"] == ("", "noise\nnoise\n")
    assert answer["skipped"]["modraises"] == "ZeroDivisionError: division by zero"
    assert answer["skipped"]["modexits"] == "SystemExit: no"
    assert answer["skipped"]["modneeds"].startswith("ModuleNotFoundError")


def test_what_modules_do_when_imported_holds_in_workers(packages: Path) -> None:
    (packages / "modsets.py").write_text(
        "import os, signal, sys\nos.environ['SET'] = 'x'; del os.environ['GONE']\n"
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN); os.umask(0o77)\n"
        "sys.path.insert(0, '/first'); sys.path.append('/last')\n"
        "argv, main = sys.argv[:], sys.modules['__main__'].__file__"
    )
    text = (
        "import modsets, os, signal, sys\nprint(os.environ['SET'], os.environ.get('GONE'), sys.path"
        ", signal.getsignal(signal.SIGUSR1), os.umask(0), modsets.argv, modsets.main, sys.path)"
    )
    with user_template(packages, text, GONE="1") as ours:
        assert ours.prepare("modsets")["skipped"] == {}
        warm = ours.run()
        cold = _plainly(ours)
    assert warm == cold


def _plainly(ours: Template) -> Ended:
    return plainly(ours.program, ours.directory, ours.environment, python=ours.python)


def test_modules_beside_the_program_are_not_imported(packages: Path, tmp_path: Path) -> None:
    (packages / "modasks.py").write_text("try:\n    import modown\nexcept ImportError: modown = 0")
    (packages / "modprobes.py").write_text("import modasks")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "modelse.py").write_text("")
    (packages / "edit.pth").write_text(str(tmp_path / "elsewhere"))
    names = ["modown", "modprobes", "modasks", "modelse", "conftest", "json.tool"]
    for is_given, kept in ((False, []), (True, ["modown", "modprobes", "modasks", "modelse"])):
        with user_template(packages, "import modasks\nprint(modasks.modown.own)\n" + SEEN) as ours:
            (ours.directory / "modown.py").write_text("own = 'own'")
            answer = ours.prepare(*names, is_given=is_given)
            assert {*kept} == {*names[:4]} - {*answer["skipped"]}
            assert {*ours.run().stdout.split()} == {"own", *(kept or ["modasks", "modown"])}
        shutil.rmtree(ours.directory)


def test_program_itself_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print('train' in sys.modules)")
    with Template(["module", "train"], tmp_path) as ours:
        answer = ours.prepare("train", "json.__main__", is_given=True)
        assert {*answer["skipped"]} == {"train", "json.__main__"}
        assert ours.run() == plainly(["module", "train"], tmp_path)


def test_program_that_was_changed_is_run_as_it_is_but_an_archive_is_stale(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    with Template(["script", "train.py"], tmp_path) as ours:
        ours.prepare()
        (tmp_path / "train.py").write_text("print('changed')")
        assert ours.ask({"type": "check"}) == {"type": "fresh"}
        assert ours.run().stdout == "changed\n"
    for text in ("print(2)", "print('changed')"):
        with zipfile.ZipFile(tmp_path / "train.zip", "w") as archive:
            archive.writestr("__main__.py", text)
        if text == "print(2)":
            zipped = Template(["script", "train.zip"], tmp_path)
            zipped.prepare()
            assert zipped.run().stdout == "2\n"
    with zipped:
        assert zipped.ask({"type": "check"})["file"] == str(tmp_path / "train.zip")


def test_module_that_comes_to_hide_one_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "wave").mkdir()
    with Template(["script", "train.py"], tmp_path) as ours:
        ours.prepare("colorsys", "wave")
        assert ours.ask({"type": "check"}) == {"type": "fresh"}
        (tmp_path / "colorsys").mkdir()
        (tmp_path / "json.pyx").touch()
        assert ours.ask({"type": "check"}) == {"type": "fresh"}
        (tmp_path / "colorsys.py").touch()
        stale = {"type": "stale", "file": str(tmp_path / "colorsys")}
        assert ours.ask({"type": "check"}) == stale


def test_changed_file_is_noticed(packages: Path) -> None:
    for name in ("moda", "modb"):
        (packages / f"{name}.py").write_text("")
    with user_template(packages) as ours:
        ours.prepare("moda", "modb")
        assert ours.ask({"type": "check"}) == {"type": "fresh"}
        (packages / "modb.py").write_text("x = 1")
        stale = {"type": "stale", "file": str(packages / "modb.py")}
        assert ours.ask({"type": "check"}) == stale


def test_template_imports_more_and_remembers_what_it_has_seen(packages: Path) -> None:
    (packages / "moda.py").write_text("import os; os.environ.get('LEVEL')")
    (packages / "modb.py").write_text("import modc")
    (packages / "modc.py").write_text("")
    with user_template(packages) as ours:
        ours.prepare("moda", "modabsent")
        before = ours.park()
        answer = ours.prepare("modb")
        assert (answer["type"], answer["modules"]) == ("ready", 2)
        before.start()
        assert before.end().stdout == "moda\n"
        assert ours.run().stdout == "moda modc modb\n"
        changed = ours.park()
        changed.start(environment={**ours.environment, "LEVEL": "1"})
        assert "LEVEL" in changed.said()["reason"]
        changed.end()
        (packages / "moda.py").write_text("changed = 1")
        assert ours.ask({"type": "check"})["file"] == str(packages / "moda.py")


def test_template_that_is_taught_what_is_unfit_starts_anew_without_it(packages: Path) -> None:
    (packages / "moda.py").write_text("")
    (packages / "modthread.py").write_text(THREAD.format("taught"))
    with user_template(packages) as ours:
        ours.prepare("moda")
        answer = ours.prepare("modthread")
        assert (answer["type"], [*answer["skipped"]]) == ("ready", ["modthread"])
        assert ours.run().stdout == "moda\n"


def test_file_changed_while_it_is_imported_is_stale(packages: Path) -> None:
    (packages / "moda.py").write_text("with open(__file__, 'a') as own: own.write('#')")
    with user_template(packages) as ours:
        ours.prepare("moda")
        assert ours.ask({"type": "check"})["type"] == "stale"


def test_nobody_is_parked_when_the_template_has_become_unsafe(packages: Path) -> None:
    (packages / "modlater.py").write_text(
        f"import signal\ndef start(*_):\n    exec({THREAD.format('late')!r})\n"
        "signal.signal(signal.SIGUSR1, start)"
    )
    with user_template(packages) as ours:
        assert ours.prepare("modlater")["type"] == "ready"
        ours.run()
        ours.process.send_signal(10)
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        answer = ours.ask({"type": "park"}, ends[0].fileno())
        assert answer == {"type": "unsafe", "reason": "has started threads: late"}
        for end in ends:
            end.close()


def test_threads_that_end_before_a_fork_forbid_none(packages: Path) -> None:
    text = "import numpy; print(numpy.ones((64, 64)).dot(numpy.ones((64, 64))).sum())"
    (packages / "numpy").symlink_to(Path(numpy.__file__).parent)
    libraries = Path(numpy.__file__).parents[1] / "numpy.libs"
    (packages / "numpy.libs").symlink_to(libraries)
    with user_template(packages, text, OPENBLAS_NUM_THREADS="2", OMP_NUM_THREADS="2") as ours:
        answer = ours.prepare("numpy")
        assert (answer["type"], answer["skipped"]) == ("ready", {})
        assert ours.run().stdout == "262144.0\n"


def test_import_in_several_messages_and_memory(packages: Path) -> None:
    with user_template(packages) as ours:
        ours.send({"type": "import", "modules": ["json"], "more": True})
        answer = ours.prepare("decimal", "absent")
        own, shared = procfs.memory_bytes(ours.process.pid) or (0, 0)
    assert (answer["modules"], [*answer["skipped"]]) == (2, ["absent"])
    assert min(own, shared) > 2**20
    assert answer["seconds"] > 0
