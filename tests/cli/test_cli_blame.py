"""`unbroken blame`: the files of jobs that somebody else ran."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli_calls import Cli
from tests.flight_dumps import Groups, Recorder
from unbroken.errors import PeerError
from unbroken.wire.flight_dump import read

WORLD: Groups = {"0": ("default_pg", range(4))}
CASES = {
    "late": ([2], [3, 3, 2, 3]),
    "chain": ([3], [4, 4, 3, 2]),
    "mismatch": ([1], [3] * 4),
    "done": ([], [2] * 4),
}
"""Culprits, and the collectives that each rank calls; the first two of each rank end."""
TRAIN = """
import json, os, pickle, sys, threading, traceback
import torch, torch.distributed as dist
import torch._dynamo  # a group imports it; here, so that no rank has to
from torch._C._distributed_c10d import _dump_fr_trace


def train(case, rank):
    folder = sys.argv[1] + "/" + case
    store = "file://" + folder + "/.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=4)
    pairs = [dist.new_group([0, 1], group_desc="pair"), dist.new_group([2, 3], group_desc="pair")]
    thread = threading.Thread(target=collectives, args=(case, rank, pairs), daemon=True)
    thread.start()
    entries = []
    while len(entries) < CASES[case][1][rank] or not all(e["retired"] for e in entries[:2]):
        thread.join(0.02)
        dump = _dump_fr_trace()
        entries = pickle.loads(dump)["entries"]
    with open(f"{folder}/nccl_trace_rank_{rank}", "wb") as file:
        file.write(dump)
    os.write(1, b"dumped\\n")
    os.read(0, 1)


def collectives(case, rank, pairs):
    x = torch.ones(4)
    dist.all_reduce(x)
    dist.all_reduce(x, group=pairs[rank // 2])
    if case == "done":
        return
    if case == "late" and rank != 2:
        dist.all_reduce(x)
    if case == "chain" and rank != 3:
        dist.all_reduce(x, group=pairs[rank // 2])
        if rank != 2:
            dist.all_reduce(x)
    if case == "mismatch":
        dist.broadcast(x, 1) if rank == 1 else dist.all_reduce(x)


CASES = json.loads(sys.argv[2])
for case in CASES:
    for rank in range(4):
        if os.fork() == 0:
            try:
                train(case, rank)
            except BaseException:
                os.write(1, traceback.format_exc().encode())
            finally:
                os._exit(0)
"""


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dumps of torch in a folder for each case, all made by forks of one process."""
    folder = tmp_path_factory.mktemp("dumps")
    for case in CASES:
        (folder / case).mkdir()
    command = [sys.executable, "-c", TRAIN, str(folder), json.dumps(CASES)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=environment,
    ) as ranks:  # fmt: skip
        assert ranks.stdout is not None
        for _ in range(4 * len(CASES)):
            assert ranks.stdout.readline() == b"dumped\n", ranks.stdout.read().decode()
    return folder


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path / "none", tmp_path)


def write(folder: Path, *, late: int = 2, form: str = "pickle") -> Path:
    """The dumps of four ranks, of which one has not called the last collective."""
    folder.mkdir(exist_ok=True)
    for rank in range(4):
        one = Recorder(rank, WORLD).call(count=5)
        if rank != late:
            one.call(state="scheduled")
        data = one.json() if form == "json" else one.pickle()
        ending = ".json" if form == "json" else ""
        (folder / f"nccl_trace_rank_{rank}{ending}").write_bytes(data)
    return folder


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_people_and_programs_are_told_the_culprit(cli: Cli, tmp_path: Path, form: str) -> None:
    folder = str(write(tmp_path / "dumps", form=form))
    text = cli.call("blame", folder).stdout
    assert "certain: rank 2\n" in text
    assert "ranks 0-1,3 wait in all_reduce 6 of group 0 (default_pg)" in text
    found = cli.json("blame", folder)
    assert (found["culprits"], found["confidence"]) == ([2], "certain")
    assert found["waits"][0]["waiting"] == [0, 1, 3]
    assert found["ranks"]["withoutDump"] == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_dumps_of_torch_name_the_rank_that_is_late(cli: Cli, dumps: Path, case: str) -> None:
    assert cli.json("blame", str(dumps / case))["culprits"] == CASES[case][0]


def test_a_bad_file_is_named_and_the_others_are_read(cli: Cli, tmp_path: Path) -> None:
    folder = write(tmp_path / "dumps")
    whole = (folder / "nccl_trace_rank_0").read_bytes()
    (folder / "nccl_trace_rank_0").write_bytes(whole[: len(whole) // 2])
    (folder / "nccl_trace_rank_9").write_bytes(b'{"entries": ' + b"[" * 100_000)
    (folder / "nccl_trace_rank_8").write_bytes(b"\x80\x02cposix\nsystem\n.")
    (folder / "nccl_trace_rank_7").write_bytes(b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns.")
    (folder / "nccl_trace_rank_6").write_bytes(b"\x80\x02]q\x00(h\x00e.")
    os.mkfifo(folder / "nccl_trace_rank_5")
    (folder / "nccl_trace_rank_4").symlink_to("/dev/zero")
    (folder / "bad\x1b[2Jname_3").write_bytes(b"\x80")
    found = cli.json("blame", str(folder))
    assert found["culprits"] == [2]
    assert len(found["notRead"]) == 8
    said = cli.call("blame", str(folder)).stderr
    assert "nccl_trace_rank_5: no regular file" in said
    assert "nccl_trace_rank_8: no flight recorder dump: names posix.system" in said


def test_what_cannot_be_read_at_all_is_an_error(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no flight recorder dump" in cli.call("blame", "empty", code=1).stderr
    assert "No such file" in cli.call("blame", "nothing", code=1).stderr
    assert "no regular file" in cli.call("blame", "/dev/zero", code=1).stderr
    cli.call("blame", code=2)


def test_the_rank_is_taken_from_the_dump_where_no_name_tells_it(cli: Cli, tmp_path: Path) -> None:
    groups: Groups = {"0": ("default_pg", range(2)), "1": ("own", (0,)), "2": ("own", (1,))}
    for rank, name in enumerate(("first", "second")):
        one = Recorder(rank, groups).call(str(rank + 1)).call()
        if rank == 0:
            one.call(state="scheduled")
        (tmp_path / name).write_bytes(one.pickle())
    found = cli.json("blame", "first", "second")
    assert found["culprits"] == [1]
    assert "process groups in the dump" in found["ranks"]["knownBy"]


SPY = """Process 41: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 41 (idle): "MainThread"
    {frame}
    train (train.py:20)
    <module> (train.py:31)
Thread 77 (idle): "Thread-1"
    wait (threading.py:331)
"""


def spy_folder(folder: Path) -> Path:
    """Stacks of four ranks, of which rank 1 sleeps."""
    folder.mkdir(exist_ok=True)
    for rank in range(4):
        frame = "all_reduce (torch/distributed/distributed_c10d.py:3252)"
        text = SPY.format(frame="get_batch (data.py:9)" if rank == 1 else frame)
        (folder / f"stacks_rank_{rank}.txt").write_text(text)
    return folder


def test_stacks_of_py_spy_name_the_rank_that_is_elsewhere(cli: Cli, tmp_path: Path) -> None:
    found = cli.json("blame", str(spy_folder(tmp_path / "spy")))
    assert found["culprits"] == [1]
    assert "get_batch (data.py:9)" in cli.call("blame", "spy").stdout


def test_stacks_and_dumps_of_one_job_are_told_together(cli: Cli, tmp_path: Path) -> None:
    write(spy_folder(tmp_path / "job"), late=1)
    found = cli.json("blame", "job")
    assert found["culprits"] == [1]
    assert {one["by"] for one in found["causes"]} == {"flight recorder", "stacks"}


WATCHDOG = (
    "[rank{0}]:[E1122 10:00:0{0}.000000000 ProcessGroupNCCL.cpp:685] [Rank {0}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, "
    "Timeout(ms)=600000) ran for 600011 milliseconds before timing out.\n"
    "[rank{0}]:[E1122 10:00:0{0}.000000000 ProcessGroupNCCL.cpp:2252] [PG ID 0 PG GUID "
    "0(default_pg) Rank {0}] Exception (either an error or timeout) detected by watchdog at work: "
    "42, last enqueued work: {1}, last completed work: 41\n"
)
TABLE = """
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_10:00:05
  host      : node-1
  rank      : 3 (local_rank: 3)
  exitcode  : -9 (pid: 977)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 977
"""


def raised(rank: int, at: str, text: str) -> str:
    return (
        f"2026-11-22 {at} step 7\n[rank{rank}]: Traceback (most recent call last):\n"
        f'[rank{rank}]:   File "train.py", line 3, in train\n[rank{rank}]: {text}\n'
    )


LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:1936"


@pytest.mark.parametrize(
    ("log", "culprits", "words"),
    [
        ("".join(WATCHDOG.format(rank, 41 if rank == 2 else 44) for rank in range(4)), [2], "41"),
        (TABLE, [3], "exit code -9"),
        (raised(0, "10:00:01", LOST) + raised(2, "10:00:02", "ValueError: bad"), [2], "bad"),
        (
            raised(1, "10:00:09", "KeyError: 'a'") + raised(0, "10:00:03", "OSError: [Errno 5]"),
            [0], "Errno 5",
        ),
        ("step 1\nstep 2\n", [], ""),
    ],
)  # fmt: skip
def test_logs_name_who_failed_first(
    cli: Cli, tmp_path: Path, log: str, culprits: list[int], words: str
) -> None:
    (tmp_path / "job.log").write_text(log)
    found = cli.json("blame", "job.log")
    assert found["culprits"] == culprits
    assert words in found["why"]


def test_an_error_of_a_rank_comes_before_those_that_wait_for_it(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "job", late=1)
    (tmp_path / "job" / "rank_1.log").write_text(raised(1, "10:00:01", "ValueError: bad"))
    found = cli.json("blame", "job")
    assert (found["culprits"], found["why"]) == ([1], "rank 1 failed first: ValueError: bad")


def test_damaged_dumps_are_read_or_refused() -> None:
    ranks = [Recorder(0, WORLD).call(count=20).pair("0", "send 0->1").call(state="scheduled")]
    drawn = random.Random(7)
    for original in (ranks[0].pickle(), ranks[0].json()):
        refused = 0
        for _ in range(1500):
            data = bytearray(original)
            for _ in range(drawn.randint(1, 6)):
                data[drawn.randrange(len(data))] = drawn.randrange(256)
            try:
                read(bytes(data[: drawn.randint(1, len(data))] if drawn.random() < 0.3 else data))
            except PeerError:
                refused += 1
        assert 100 < refused < 1500


@pytest.mark.parametrize("value", [None, 1, "a", [], [[]], {}, {"a": 1}, -1, 1e300, True])
def test_values_of_other_types_are_refused(value: Any) -> None:
    whole = Recorder(0, WORLD).call(count=3).call(state="scheduled").value()
    for place in (whole, whole["pg_config"], whole["pg_status"], whole["entries"][-1]):
        for name in list(place):
            kept = place[name]
            place[name] = value
            try:
                read(json.dumps(whole).encode())
            except PeerError as error:
                assert len(str(error)) <= 200
            place[name] = kept


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_dumps_of_the_real_py_spy_are_read(
    cli: Cli, tmp_path: Path, options: tuple[str, ...]
) -> None:
    script = cli.script("wait.py", "import time\nprint('up', flush=True)\ntime.sleep(1000)\n")
    spy = str(Path(sys.executable).parent / "py-spy")
    with subprocess.Popen(
        [sys.executable, script], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        dump = subprocess.run(
            [spy, "dump", *options, "--pid", str(process.pid)], capture_output=True, check=False
        )
        process.kill()
    if dump.returncode:
        pytest.skip(f"py-spy may not look: {dump.stderr.decode()[-200:]}")
    (tmp_path / "stacks_rank_0").write_bytes(dump.stdout)
    found = cli.json("blame", "stacks_rank_0")
    assert (found["culprits"], found["ranks"]["stacks"]) == ([0], [0])
    assert "wait.py" in found["why"]
