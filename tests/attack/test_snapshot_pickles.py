"""A snapshot's structure was a restricted pickle, and its restriction could be removed.

A pickle of three names (numpy.dtypes.__builtins__, builtins.slice, torch._import_dotted_name) ran
`os.system` in the worker that restored it. Any rank of the job could PUT such a snapshot. A program
that wrote a flight recorder's dump could do the same.
"""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attack import pickle_payloads
from unbroken.agent.evidence.examine import read
from unbroken.errors import PeerError, SpecError
from unbroken.wire import pickled
from unbroken.wire.snapshot import BODY_AT
from unbroken.worker.snapshot.state import collect, load, parse, view
from unbroken.worker.typed_values import DEPTH_MAX, NotEncodable, decode, encode

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.binary() | st.complex_numbers(allow_nan=False) | st.datetimes() | st.dates()
    | st.timedeltas(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner)
    | st.builds(deque, st.lists(inner)) | st.frozensets(st.integers() | st.text()),
    max_leaves=30,
)  # fmt: skip


def body(payload: bytes) -> bytes:
    """A structure whose one part has these bytes."""
    return encode(({"extra": payload}, []))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that a payload would make."""
    return tmp_path / "made"


def test_no_pickle_runs_as_a_structure_a_part_or_a_dump(marker: Path) -> None:
    payloads = pickle_payloads.all_of(str(marker))
    assert len(payloads) > 80
    tracemalloc.start()
    for payload in payloads:
        with pytest.raises(ValueError, match="structure cannot be read"):
            parse(payload, bytearray(BODY_AT), {})
        with pytest.raises(ValueError, match=r"."):
            parse(body(payload), bytearray(BODY_AT), {}).state("extra", copies=True)
        with pytest.raises(PeerError):
            read(payload)
        with contextlib.suppress(ValueError):
            assert pickled.load(payload) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not marker.exists()
    assert peak < 10_000_000


@given(PLAIN)
@settings(max_examples=200, deadline=None)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert decode(encode(value)) == value


@given(PLAIN, st.data())
@settings(max_examples=300, deadline=None)
def test_mutated_bytes_are_refused_or_are_values(value: Any, data: st.DataObject) -> None:
    bad = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 4))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        decode(bytes(bad[: data.draw(st.integers(0, len(bad)))] or bad))


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_rubbish_is_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode(data)
    with pytest.raises(ValueError, match=r"."):
        parse(data, bytearray(BODY_AT), {})
    with contextlib.suppress(ValueError):
        pickled.load(data)


def test_what_states_of_training_hold_comes_back() -> None:
    tied = torch.arange(6.0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    scaler = torch.amp.GradScaler("cpu")
    shared = [1, 2]
    generator = np.random.default_rng(3)
    values: dict[Any, Any] = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(), "scaler": scaler.state_dict(),
        "python": random.getstate(), "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(), "generator": generator.bit_generator.state,
        "order": list(range(1000)), ("a", 1): {2: {3}}, "size": torch.Size([1]),
        "device": torch.device("cpu"), "dtype": torch.bfloat16, "count": Counter("abc"),
        "default": defaultdict(list, {1: [2]}), "ordered": OrderedDict(a=deque([1], 3)),
        "number": np.float64(0.5), "kind": np.dtype("int16"), "tied": [tied, tied],
        "tensors": [
            torch.ones(2, 3).t(), torch.tensor(1.5), torch.empty(0, 3), torch.ones(2) * 1j,
            torch.ones(3, dtype=torch.bfloat16), torch.ones(3).to(torch.float8_e4m3fn),
            torch.ones(2, dtype=torch.bool), torch.ones(4)[::2], (torch.ones(2) * 1j).conj(),
        ],
        "arrays": [np.ones((2, 2))[:, 0], np.array(3), np.ones(2, np.complex64)],
        "shared": [shared, shared],
    }  # fmt: skip
    state = collect({"extra": values}, has_rng=False)
    memory = bytearray(BODY_AT + state.payload_bytes)
    for piece, tensor in zip(state.pieces, state.tensors, strict=True):
        view(memory, piece).copy_(tensor)
    found = parse(state.structure, memory, {}).state("extra", copies=True)
    assert _alike(found, values)
    assert found["shared"][0] is found["shared"][1]
    assert found["tied"][0] is found["tied"][1]
    assert found["model"]._metadata == values["model"]._metadata
    extra: dict[str, Any] = {}
    load(parse(state.structure, memory, {}), {"extra": extra}, has_rng=False)
    assert extra.keys() == values.keys()


def _alike(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and bool((one == other).all())
    if isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in other)
    if isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


class Odd:
    """A class of a user's."""


def nested(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


def looped() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            {"a": [1, {"b": Odd()}]},
            r"extra\['a'\]\[1\]\['b'\] holds a tests.attack.test_snapshot_pickles.Odd",
        ),
        ({"f": len}, r"extra\['f'\] holds a builtins.builtin_function"),
        ({"f": defaultdict(lambda: 1)}, r"extra\['f'\]\[.*\] holds a builtins.function"),
        ({"f": OrderedDict(x=Odd())}, r"extra\['f'\]\['x'\] holds a"),
        ({"t": torch.ones(2).to_sparse()}, r"extra\['t'\] holds a tensor that is sparse"),
        ({"n": np.array([Odd()])}, r"extra\['n'\] holds a numpy array of object"),
        ({"n": np.array(["a"])}, r"extra\['n'\] holds a numpy array of <U1"),
        (nested(DEPTH_MAX + 5), "levels of containers"),
        (looped(), r"extra\[0\] holds a container that holds itself"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_place(value: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words) as refused:
        collect({"extra": value}, has_rng=False)
    assert "convert it" in str(refused.value)


def test_bombs_are_refused() -> None:
    deep = b"l" + struct.pack("<I", 1)
    with pytest.raises(ValueError, match="levels deep"):
        decode(deep * 5000 + b"N")
    with pytest.raises(ValueError, match="items in"):
        decode(b"l\xff\xff\xff\xff")
    laughs: list[Any] = ["ha"]
    for _ in range(60):
        laughs = [laughs, laughs]
    data = encode(laughs)
    assert len(data) < 1000
    with pytest.raises(ValueError, match="repeated containers"):
        decode(data)


@pytest.mark.parametrize(
    "row",
    [
        (BODY_AT, "os", (1,), "tensor", ()),
        (BODY_AT, "load", (1,), "tensor", ()),
        (BODY_AT, "float32", (1 << 60,), "tensor", ()),
        (BODY_AT, "float32", (-1,), "tensor", ()),
        (BODY_AT, "float32", (True,), "tensor", ()),
        (0, "uint8", (1,), "tensor", ()),
        (-8, "uint8", (1,), "tensor", ()),
        (BODY_AT, "uint8", (1,), "code", ()),
        (BODY_AT, "uint8", (1,), "tensor", ((1,), (1,), ((1,), (0,), (len,)), ())),
        (BODY_AT, "uint8", (1,)),
        None,
    ],
)
def test_a_tensor_outside_of_the_slot_is_refused(row: Any) -> None:
    with contextlib.suppress(NotEncodable):
        data = encode(({}, [row]))
        with pytest.raises(ValueError, match="structure cannot be read"):
            parse(data, bytearray(BODY_AT + 4096), {})


def test_a_dump_with_a_nested_text_is_refused_at_once() -> None:
    # Its text would have 2 ** 60 characters.
    name = b"](NNe" + b"q\x00" + b"".join(b"0](h\x00h\x00eq\x00" for _ in range(60))
    dump = b"}" + pickle_payloads.text("entries") + b"](}(" + b"".join(
        pickle_payloads.text(key) + value
        for key, value in {
            "process_group": name + b"h\x00\x86", "collective_seq_id": b"K\x01",
            "profiling_name": pickle_payloads.text("a"), "state": pickle_payloads.text("b"),
            "retired": b"\x89", "is_p2p": b"\x89",
        }.items()
    ) + b"ues."  # fmt: skip
    with pytest.raises(PeerError):
        read(dump)


def test_a_long_pickle_ends_within_its_opcodes() -> None:
    with pytest.raises(ValueError, match="more than 1000 opcodes"):
        pickled.load(b"NN\x86" * 10_000 + b".", opcodes=1000)
