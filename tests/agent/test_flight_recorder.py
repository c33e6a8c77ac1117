"""Dumps of torch's flight recorder are read as data, whatever they hold."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.agent.evidence.examine import Request, read
from unbroken.errors import PeerError
from unbroken.wire.observation import Collective

# Rank 1 does not enter the third collective; rank 0 dumps its record while it waits there. A thread
# of torch notes the end of a collective, which may be after the call has returned.
SCRIPT = """
import os, pickle, sys, threading
import torch, torch.distributed as dist
store = "file://" + sys.argv[1]
dist.init_process_group("gloo", init_method=store, rank=int(sys.argv[2]), world_size=2)
other = dist.new_group([0, 1], group_desc="side")
x = torch.ones(2)
dist.all_reduce(x)
dist.broadcast(x, 0, group=other)
if sys.argv[2] == "1":
    sys.stdin.read()
    os._exit(0)
from torch._C._distributed_c10d import _dump_fr_trace
threading.Thread(target=dist.all_reduce, args=(x,), daemon=True).start()
while True:
    dump = _dump_fr_trace()
    if [entry["retired"] for entry in pickle.loads(dump)["entries"]] == [True, True, False]:
        break
sys.stdout.buffer.write(dump)
sys.stdout.flush()
os._exit(0)
"""


def answer(request: Request) -> tuple[Collective, ...]:
    """Return the answer of a rank once it is read."""
    if (fetched := request.fetch()) is not None:
        fetched.result()
    return request.collectives


@pytest.mark.slow
def test_a_dump_of_torch_tells_where_a_rank_waits(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "store"), str(rank)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ,
        )
        for rank in range(2)
    ]  # fmt: skip
    dump = ranks[0].communicate()[0]
    ranks[1].communicate()
    assert read(dump) == (
        Collective("0(default_pg)", 2, "all_reduce", "scheduled"),
        Collective("1(side)", 1, "broadcast", "completed"),
    )


def entry(sequence: int, **changes: object) -> dict[str, object]:
    return {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": sequence,
        "profiling_name": "nccl:all_gather",
        "state": "started",
        "retired": False,
        "is_p2p": False,
    } | changes


def test_the_newest_collective_counts_and_what_goes_between_two_ranks_does_not() -> None:
    entries = [entry(7), entry(8), entry(9, is_p2p=True), entry(3, retired=True)]
    dump = pickle.dumps({"entries": entries})
    assert read(dump) == (Collective("0(default_pg)", 8, "all_gather", "started"),)
    assert read(pickle.dumps({"entries": []})) == ()


class Evil:
    """Calls a function when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("made",)


def test_a_dump_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PeerError, match=r"names posix\.mkdir"):
        read(pickle.dumps({"entries": [Evil()]}))
    assert list(tmp_path.iterdir()) == []


@given(
    st.binary(max_size=100)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=9),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(sorted(entry(1))), inner),
    ).map(lambda value: pickle.dumps({"entries": [value]}))
)
def test_rubbish_is_refused_or_read(dump: bytes) -> None:
    with contextlib.suppress(PeerError):
        assert len(read(dump)) <= 1


def test_a_rank_is_asked_by_its_pipe_and_only_news_is_its_answer(tmp_path: Path) -> None:
    environ = {
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe_",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/trace_",
    }
    old, pipe = tmp_path / "trace_5", tmp_path / "pipe_5.pipe"
    old.write_bytes(pickle.dumps({"entries": [entry(1)]}))
    os.mkfifo(pipe)
    assert answer(Request(5, environ)) == (), "nobody listens"
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    request = Request(5, environ)
    assert answer(request) == ()
    assert os.read(reader, 10) == b"1"
    os.close(reader)
    new = tmp_path / "new"
    new.write_bytes(pickle.dumps({"entries": [entry(2)]}))
    new.replace(old)
    assert [one.sequence for one in answer(request)] == [2]
    assert answer(Request(5, {})) == ()
