"""Parked workers that import what reads variables of a rank: equal to cold starts, or not used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.worker import module_values
from tests.worker.module_values import differences, values
from tests.worker.templates import SEEN, Ended, Template, plainly, user_packages, user_template
from unbroken.wire.warm import THREADS

pytestmark = pytest.mark.slow

RANK = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node-0"}
ATTEMPT = {"MASTER_PORT": "29400", "JOB_RESTART_COUNT": "2"}
# As polars does: a thread of an extension module, which no child has.
NATIVE = """
import ctypes
libc, one = ctypes.CDLL(None), ctypes.c_ulong()
pause = ctypes.cast(libc.pause, ctypes.c_void_p)
libc.pthread_create(ctypes.byref(one), None, pause, None)
"""
THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
MODULES = {
    # torch.cuda keeps stacks, torch.jit a table by the addresses of its functions.
    "modplain": "import traceback\nVALUE = object()\n"
    "STACK, TABLE = traceback.format_stack(), {id(VALUE): 1}",
    # lightning_fabric.utilities.rank_zero: an attribute of a function.
    "modzero": "import os\ndef zero_only(): pass\n"
    "zero_only.rank = next((int(os.environ[k]) for k in ('RANK', 'LOCAL_RANK')"
    " if os.environ.get(k) is not None), 0)",
    "modouter": "from modzero import zero_only\nIS_FIRST = zero_only.rank == 0\n"
    "if not IS_FIRST:\n    class Late: pass",
    "modsets": "import os, modouter\nos.environ.setdefault('MODSETS', os.environ['WORLD_SIZE'])",
    "modlate": "import modplain, modsets\nNAMES = {'a', 'b'}\ndef name(default=modplain): pass",
}


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Return a directory that the template takes for site-packages: one user's."""
    return user_packages(tmp_path)


def prepared(packages: Path, modules: Mapping[str, str], text: str = SEEN) -> Template:
    """Return the template of a program, with these modules installed."""
    for name, code in modules.items():
        (packages / f"{name}.py").write_text(code)
    return user_template(packages, text)


def cold(ours: Template, environment: Mapping[str, str]) -> Ended:
    """Return how the program ends that a new interpreter has run."""
    return plainly(ours.program, ours.directory, environment, python=ours.python)


def test_modules_of_a_prepared_worker_equal_those_of_a_cold_start(packages: Path) -> None:
    text = Path(module_values.__file__).read_text()
    with prepared(packages, MODULES, text.replace("sys.argv[1:]", repr([*MODULES]))) as ours:
        answer = ours.prepare(*MODULES)
        assert (answer["modules"], answer["later"]) == (1, 4)
        worker = ours.park()
        assert worker.prepare(RANK) == {"type": "prepared", "modules": 4, "left_out": {}}
        environment = {**ours.environment, **RANK, **ATTEMPT}
        worker.start(environment=environment)
        assert worker.said() == {"type": "end"}, "it is warm"
        warm = worker.end()
        ends = [cold(ours, environment) for _ in range(2)]
        other = cold(ours, {**environment, "RANK": "0"})
    assert {end.code for end in (warm, *ends)} == {0}
    assert warm.stderr == ""
    before = [values(end.stdout) for end in ends]
    assert before[0]["modouter.'zero_only'.dict.'rank'"] == "3"
    assert differences(before, values(warm.stdout)) == {}
    assert {"modouter.'IS_FIRST'", "modouter.'Late'"} <= {
        *differences(before, values(other.stdout))
    }


def test_a_prepared_worker_has_imported_before_its_start(packages: Path) -> None:
    with prepared(packages, MODULES, SEEN + "\nimport os; print(os.environ['MODSETS'])") as ours:
        ours.prepare(*MODULES)
        worker, other = ours.park(), ours.park()
        worker.prepare(RANK)
        for each in (worker, other):
            each.start(environment={**ours.environment, **RANK, "MODSETS": "mine"})
        assert other.end().stdout == "modplain\nmine\n", "no preparation of another is seen"
        assert worker.said()["reason"].startswith("MODSETS has changed")
        worker.end()
        again = ours.park()
        again.prepare(RANK)
        again.start(environment={**ours.environment, **RANK, **ATTEMPT})
        assert again.end().stdout == "modplain modzero modouter modsets modlate\n4\n"


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"RANK": "2"}, "RANK"), ({"WORLD_SIZE": "2"}, "WORLD_SIZE"), ({"MASTER_ADDR": "b"}, "")],
)
def test_a_worker_prepared_for_other_values_than_it_read_starts_cold(
    changed: dict[str, str], named: str, packages: Path
) -> None:
    text = "import modlate, modouter, sys; print(modouter.zero_only.rank, modouter.IS_FIRST)"
    with prepared(packages, MODULES, text) as ours:
        ours.prepare(*MODULES)
        worker = ours.park()
        worker.prepare(RANK)
        environment = {**ours.environment, **RANK, **changed}
        worker.start(environment=environment)
        said = worker.said()
        assert said["type"] == ("cold" if named else "end")
        assert said.get("reason", "").startswith(named)
        assert worker.end() == cold(ours, environment)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (THREAD, "has started threads"),
        ("import socket; kept = socket.socket()", "holds a socket"),
        ("import os; os.chdir('/')", "has changed the directory to /"),
        ("os.environ.get('MASTER_PORT')", "MASTER_PORT is read while it is imported"),
        ("import modown", "modown is not of the interpreter's library or site-packages"),
    ],
)
def test_what_is_unfit_for_another_reason_ends_the_worker_and_is_left_out_then(
    code: str, reason: str, packages: Path
) -> None:
    bad = f"import os; os.environ.get('RANK')\n{code}"
    modules = {**MODULES, "modbad": bad, "modafter": "import modbad"}
    with prepared(packages, modules) as ours:
        (ours.directory / "modown.py").write_text("")
        assert ours.prepare(*modules)["later"] == 6
        left_out: dict[str, str] = {}
        worker = ours.park()
        while (answer := worker.prepare(RANK, left_out))["left_out"]:
            left_out |= answer["left_out"]
            assert worker.end().code == 0
            worker = ours.park()
        assert left_out["modbad"].startswith(reason)
        assert {*left_out} == {"modbad", "modafter"}
        assert answer["modules"] == 4
        worker.start(environment={**ours.environment, **RANK})
        assert worker.end().stdout.split() == [*MODULES]


def test_a_file_that_has_changed_since_makes_a_prepared_worker_cold(packages: Path) -> None:
    with prepared(packages, MODULES, "import modouter, modzero; print(modzero.__doc__)") as ours:
        ours.prepare(*MODULES)
        for change in (packages / "modzero.py", ours.directory / "modouter.py"):
            worker = ours.park()
            worker.prepare(RANK)
            change.write_text(f"'changed'\n{MODULES[change.stem]}")
            assert ours.ask({"type": "check"}) == {"type": "fresh"}, "the template has not read it"
            worker.start(environment={**ours.environment, **RANK})
            assert "changed" in worker.said()["reason"]
            assert worker.end().stdout == "changed\n"


def test_modules_of_a_package_that_reads_the_rank_are_imported_with_it(packages: Path) -> None:
    (packages / "modpack").mkdir()
    (packages / "modpack" / "__init__.py").write_text("import os; os.environ.get('RANK')")
    (packages / "modpack" / "modpart.py").write_text("")
    with prepared(packages, {}) as ours:
        assert ours.prepare("modpack", "modpack.modpart")["later"] == 2
        worker = ours.park()
        worker.prepare(RANK)
        worker.start(environment={**ours.environment, **RANK})
        assert worker.end().stdout == "modpack modpack.modpart\n"


def test_a_chain_of_importers_names_the_module_that_reads_the_rank(packages: Path) -> None:
    with prepared(packages, MODULES) as ours:
        ours.prepare(*MODULES)
    reason = "modzero: RANK is read while it is imported"
    assert ours.found["left_out"]["modouter"] == ours.found["left_out"]["modlate"] == reason


def test_modules_whose_library_starts_threads_are_imported_by_the_parked_worker(
    packages: Path,
) -> None:
    modules = {"modplain": "", "modnative": NATIVE, "modafter": "import modnative"}
    text = f"import os\n{SEEN}\nprint(len(os.listdir('/proc/self/task')))"
    with prepared(packages, modules, text) as ours:
        answer = ours.prepare(*modules)
        assert (answer["modules"], answer["later"]) == (1, 2)
        first, second = ours.park(), ours.park()
        assert first.prepare(RANK) == {"type": "prepared", "modules": 2, "left_out": {}}
        for each in (first, second):
            each.start(environment={**ours.environment, **RANK})
            assert each.said() == {"type": "end"}, "it is warm"
        assert first.end().stdout == "modplain modnative modafter\n2\n"
        assert second.end().stdout == "modplain\n1\n", "only who has imported has the thread"
        last = ours.park()  # The template has no thread.
        last.pair.close()
        assert last.end().code == 0
    reason = ours.found["left_out"]["modnative"]
    assert reason.startswith("has started threads (")
    assert reason.endswith(THREADS)
    assert ours.found["left_out"]["modafter"] == f"modnative: {reason}"


def test_threads_of_python_are_left_to_the_program(packages: Path) -> None:
    with prepared(packages, {"modboth": f"{NATIVE}\n{THREAD}"}) as ours:
        assert ours.prepare("modboth")["later"] == 0
        assert ours.found["left_out"]["modboth"].startswith("has started threads: Thread-1")
