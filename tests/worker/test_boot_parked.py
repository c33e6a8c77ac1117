"""Parked workers: whose children they are, what they are given, and when they start cold."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.worker.templates import BOOT, Template, plainly
from unbroken.wire.warm import IN_PROCESS_VARIABLE, LEARNT_VARIABLE
from unbroken.wire.worker import PAGE_BYTES, VARIABLE, empty, read

pytestmark = pytest.mark.slow
PROGRAM = ["script", "train.py"]


def test_parked_worker_is_ours_leads_its_session_and_ends_with_its_pair(tmp_path: Path) -> None:
    with Template(PROGRAM, tmp_path) as template:
        template.prepare()
        worker, other = template.park(), template.park()
        status = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        assert [int(field) for field in status[1:4]] == [os.getpid(), worker.pid, worker.pid]
        worker.pair.close()
        assert os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1]) == 0
        template.process.kill()
        template.process.wait()
        assert os.waitpid(other.pid, os.WNOHANG) == (0, 0)
        other.pair.close()
        os.waitpid(other.pid, 0)


def test_template_ends_with_its_pair(tmp_path: Path) -> None:
    for modules in ((), ("json",)):
        with Template(PROGRAM, tmp_path) as template:
            if modules:
                template.prepare(*modules)
        assert template.process.returncode == 0


def test_killed_worker_leaves_the_template_at_work(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    with Template(PROGRAM, tmp_path) as template:
        template.prepare()
        worker = template.park()
        worker.kill()
        os.waitpid(worker.pid, 0)
        worker.pair.close()
        assert template.run().stdout == "trained\n"


def test_descriptors_get_their_numbers_and_nothing_else_is_open(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\n"
        "for name in sorted(os.listdir('/proc/self/fd'), key=int):\n"
        "    path = f'/proc/self/fd/{name}'\n"
        "    if os.path.lexists(path):\n"
        "        print(name, os.readlink(path), os.get_inheritable(int(name)))"
    )
    files = {number: os.memfd_create(f"given-{number}") for number in (3, 64, 65, 66, 200)}
    with Template(PROGRAM, tmp_path) as template:
        template.prepare()
        worker = template.park()
        worker.start(given={65: files[65], 64: files[64], 3: files[3], 66: files[66]})
        assert worker.said() == {"type": "end"}
        lines = worker.end().stdout.splitlines()
    expected = ["0 /dev/null True", "1 /memfd:stdout", "2 /memfd:stderr", "3 /memfd:given-3"]
    expected += [f"{number} /memfd:given-{number}" for number in (64, 65, 66)]
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)
        assert line.endswith(" True")
    for fd in files.values():
        os.close(fd)


@pytest.mark.parametrize("variable", ["PYTHONHASHSEED", "OMP_NUM_THREADS", "LD_LIBRARY_PATH"])
def test_variable_that_was_read_at_start_makes_it_cold(variable: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint(sys.flags.hash_randomization, sys.argv, sys.orig_argv, os.getpid())"
    )
    environment = {**os.environ, variable: "0"}
    with Template(PROGRAM, tmp_path, {**os.environ, variable: "1"}) as template:
        template.prepare()
        worker = template.park()
        worker.start(environment=environment)
        assert worker.said()["type"] == "cold"
        expected = plainly(PROGRAM, tmp_path, environment)
        assert worker.end().stdout.split()[:-1] == expected.stdout.split()[:-1]


def test_variable_that_a_module_read_makes_it_cold(tmp_path: Path) -> None:
    (tmp_path / "modreads.py").write_text("import os; level = os.environ.get('LEVEL', 'none')")
    (tmp_path / "train.py").write_text("import modreads; print(modreads.level)")
    with Template(PROGRAM, tmp_path) as template:
        template.prepare("modreads", is_given=True)
        for value, says in (("high", "cold"), (None, "end")):
            worker = template.park()
            worker.start(environment={**os.environ, **({"LEVEL": value} if value else {})})
            assert worker.said()["type"] == says
            assert worker.end().stdout == f"{str(value).lower()}\n"


def test_descriptor_of_a_module_is_not_taken_from_it(tmp_path: Path) -> None:
    (tmp_path / "modopens.py").write_text("import os; fd = os.open(__file__, 0); os.dup2(fd, 90)")
    (tmp_path / "train.py").write_text(
        "import modopens, os; print(os.readlink('/proc/self/fd/90'))"
    )
    with Template(PROGRAM, tmp_path) as template:
        template.prepare("modopens", is_given=True)
        worker = template.park()
        worker.start(given={90: os.memfd_create("given")})
        assert "descriptor 90" in worker.said()["reason"]
        assert worker.end().stdout == f"{tmp_path}/modopens.py\n"


def test_our_own_library_is_imported_beforehand_and_tells(tmp_path: Path) -> None:
    script = """import sys, os
was = "unbroken.worker" in sys.modules
from unbroken import worker
worker.progress(7)
if os.fork() == 0:
    worker.progress(8)
    os._exit(0)
os.wait()
print(was)
"""
    (tmp_path / "train.py").write_text(script)
    page = os.memfd_create("page")
    os.write(page, empty())
    with Template(["script", "train.py"], tmp_path) as ours:
        assert not ours.prepare("unbroken.worker")["skipped"]
        environment = {**os.environ, VARIABLE: "60"}
        assert ours.run(environment=environment, given={60: page}).stdout == "True\n"
    told = read(os.pread(page, PAGE_BYTES, 0))
    os.close(page)
    assert told is not None
    assert told[1].step == 7


def test_forks_share_no_randomness(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import multiprocessing, numpy, os, random, tempfile, threading, uuid\n"
        "print(numpy.random.rand(), random.random(), uuid.uuid4(), tempfile.mktemp(),"
        "multiprocessing.current_process().authkey, numpy.random.default_rng().random())\n"
        "assert threading.main_thread().native_id == os.getpid() == threading.get_native_id()"
    )
    with Template(PROGRAM, tmp_path) as template:
        template.prepare("numpy.random", "random", "uuid", "tempfile", "multiprocessing")
        first, second = template.run(), template.run()
    assert (first.code, second.code) == (0, 0)
    assert not {*first.stdout.split()} & {*second.stdout.split()}


def test_directory_is_the_orders(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text("import os, sys; print(os.getcwd(), sys.path[0])")
    with Template(PROGRAM, tmp_path) as template:
        template.prepare()
        worker = template.park()
        worker.start(["script", "train.py", "x"], directory=tmp_path / "sub")
        assert worker.end() == plainly(["script", "train.py", "x"], tmp_path / "sub")


def test_edited_script_and_new_module_are_seen(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('old')")
    with Template(PROGRAM, tmp_path) as template:
        template.prepare("modnew")
        worker = template.park()
        (tmp_path / "train.py").write_text("import modnew")
        (tmp_path / "modnew.py").write_text("print('new')")
        worker.start()
        assert worker.end().stdout == "new\n"


def test_learns_what_is_imported_in_order_and_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import importlib.util, os, sys\n"
        f"assert {LEARNT_VARIABLE!r} not in os.environ\n"
        "for _ in range(3):\n"
        "    try:\n        import absent\n    except ImportError: pass\n"
        "importlib.util.find_spec('wave')\n"
        "import decimal, json.tool\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    import wave, colorsys, cgi; os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "import csv, fractions, colorsys"
    )
    for boot in (["run"], []):
        learnt = os.memfd_create("learnt")
        environment = {**os.environ, LEARNT_VARIABLE: str(learnt), "PYTHONWARNINGS": "ignore"}
        if boot:
            ended = _run_with(tmp_path, environment, learnt)
        else:
            with Template(PROGRAM, tmp_path, {**os.environ, "PYTHONWARNINGS": "ignore"}) as ours:
                ours.prepare()
                worker = ours.park()
                worker.start(environment=environment, given={learnt: learnt})
                ended = worker.end().code
        os.lseek(learnt, 0, os.SEEK_SET)
        with open(learnt) as file:
            names = file.read().split()
        assert ended == 0
        assert len(names) == len({*names})
        assert {"absent", "wave", "cgi"}.isdisjoint(names)
        assert [n for n in names if n in ("decimal", "json.tool", "csv", "fractions")] == [
            "decimal",
            "json.tool",
            "csv",
            "fractions",
        ]


def _run_with(directory: Path, environment: dict[str, str], fd: int) -> int:
    actions = [(os.POSIX_SPAWN_DUP2, fd, fd)]
    command = [sys.executable, "-u", BOOT, "run", "script", str(directory / "train.py")]
    pid = os.posix_spawn(sys.executable, command, environment, file_actions=actions)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_file_at_the_learners_number_is_left_alone(tmp_path: Path) -> None:
    learnt = os.memfd_create("learnt")
    (tmp_path / "train.py").write_text(
        f"import os\nmine = os.open({str(tmp_path / 'mine')!r}, os.O_CREAT | os.O_WRONLY)\n"
        f"os.dup2(mine, {learnt})\nimport decimal, csv, json.tool"
    )
    assert _run_with(tmp_path, {**os.environ, LEARNT_VARIABLE: str(learnt)}, learnt) == 0
    assert (tmp_path / "mine").read_text() == ""
    os.close(learnt)


STORE = """
import datetime, socket, sys, threading
import torch.distributed as dist
refused, connect = threading.Event(), socket.create_connection
def watched(*given):
    try:
        return connect(*given)
    except ConnectionRefusedError:
        refused.set()
        raise
socket.create_connection = watched
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
def client():
    seconds = datetime.timedelta(seconds=30)
    store, *_ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=seconds))
    store.set("from", "client")
thread = threading.Thread(target=client)
thread.start()
assert refused.wait(20), "torch has met that nobody listens"
store = dist.TCPStore("127.0.0.1", port, 2, True, datetime.timedelta(seconds=30))
print(store.get("from").decode())
thread.join()
"""


def test_store_that_is_not_there_yet_costs_a_warm_worker_no_pause(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STORE)
    with Template(PROGRAM, tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"}) as template:
        template.prepare("torch", "torch.distributed")
        ended = template.run()
    assert (ended.stdout, ended.stderr, ended.code) == ("client\n", "", 0)


LOOK = """
import sys, torch.distributed as dist
print(sys.modules["torch.distributed.rendezvous"].TCPStore is dist.TCPStore)
"""


@pytest.mark.parametrize("switch", ["on", "off"])
def test_a_warm_worker_has_torch_as_it_is_where_that_is_asked_for(
    tmp_path: Path, switch: str
) -> None:
    (tmp_path / "train.py").write_text(LOOK)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", IN_PROCESS_VARIABLE: switch}
    with Template(PROGRAM, tmp_path, environment) as template:
        template.prepare("torch", "torch.distributed")
        assert template.run().stdout == f"{switch == 'off'}\n"


def test_torch_is_imported_beforehand(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys\nbefore = 'torch' in sys.modules\nimport torch\n"
        "print(before, torch.ones(64, 64).mm(torch.ones(64, 2)).sum())\n"
        "print(torch.initial_seed(), file=sys.stderr)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with Template(PROGRAM, tmp_path, environment) as template:
        assert template.prepare("torch", "torch.distributed")["skipped"] == {}
        assert template.ask({"type": "check"}) == {"type": "fresh"}
        first, second = template.run(), template.run()
    assert first.stdout == second.stdout == "True tensor(8192.)\n"
    assert first.stderr != second.stderr
