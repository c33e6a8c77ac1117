"""A user who could write to the checkpoint folder ran code in all ranks that restored from it.

The metadata and the results of writing were unpickled. Each rank's own file, and all data that was
no tensor, was loaded with `weights_only=False`.
"""

from __future__ import annotations

import enum
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

from tests.attack import pickle_payloads
from unbroken import worker
from unbroken.worker.checkpointing.checkpoints import Checkpoints
from unbroken.worker.checkpointing.dcp import load_plain, read_metadata
from unbroken.worker.checkpointing.files import Directory
from unbroken.worker.checkpointing.state import Objects, Staged, generators, own_name
from unbroken.worker.checkpointing.storage import CheckpointError


def trained() -> dict[str, Any]:
    """A model and its optimizer after a step."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=np.float64(0.5))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def saved(directory: Path, **more: Any) -> tuple[Path, dict[str, Any]]:
    """The folder of a checkpoint, and what is in it."""
    objects = trained()
    checkpoints = worker.checkpoints(directory)
    assert checkpoints.save(1, **objects, **more)
    checkpoints.wait()
    assert checkpoints.failed == 0
    (place,) = directory.glob("step-*")
    return place, objects


def at(place: Path, file: str = "") -> tuple[Directory, str]:
    """The storage of a checkpoint's folder, and the name of it or of a file in it."""
    return Directory(place.parent), f"{place.name}/{file}" if file else place.name


def test_no_pickle_runs_in_place_of_the_metadata_or_of_a_rank(tmp_path: Path) -> None:
    place, objects = saved(tmp_path)
    marker = tmp_path / "made"
    for payload in pickle_payloads.all_of(str(marker)):
        (place / ".metadata").write_bytes(payload)
        with pytest.raises(CheckpointError):
            read_metadata(*at(place, ".metadata"))
        (place / own_name(0)).write_bytes(payload)
        with pytest.raises(CheckpointError):
            Objects(objects).load_own(*at(place), 0)
    assert not marker.exists()


def test_no_object_of_a_tensor_file_or_an_older_checkpoint_runs(tmp_path: Path) -> None:
    place, objects = saved(tmp_path)
    marker = tmp_path / "made"
    (place / own_name(0)).unlink()
    evil = pickle_payloads.Call(pickle_payloads.os.mkdir, str(marker))
    torch.save({"objects": {}, "rng": None, "extra": evil}, place / "rank-00000.pt")
    with pytest.raises(CheckpointError, match="without running code"):
        Objects(objects).load_own(*at(place), 0)
    data = next(place.glob("*.distcp"))
    found = read_metadata(*at(place, ".metadata"))
    for info in found.storage_data.values():
        with data.open("r+b") as file:
            file.seek(info.offset)
            torch.save(evil, file)
            with data.with_suffix(".end").open("wb") as end:
                torch.save(evil, end)
            info.offset, info.length = 0, data.with_suffix(".end").stat().st_size
    data.write_bytes(data.with_suffix(".end").read_bytes())
    (place / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError):
        Objects(objects).load_sharded(*at(place))
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../other.distcp", "/etc/passwd", "a/b", "", ".."])
def test_metadata_names_no_file_elsewhere(name: str, tmp_path: Path) -> None:
    place, _ = saved(tmp_path)
    found = read_metadata(*at(place, ".metadata"))
    next(iter(found.storage_data.values())).relative_path = name
    (place / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match="names the file"):
        read_metadata(*at(place, ".metadata"))


def by_attribute(member: enum.Enum) -> Any:
    """Return how Python 3.11.0 to 3.11.3 pickle a member: as an attribute of its class."""
    return getattr, (type(member), member.name)


def by_value(member: enum.Enum) -> Any:
    """Return how all other versions of Python pickle a member."""
    return type(member), (member.value,)


@pytest.mark.parametrize("reduced", [by_attribute, by_value])
@pytest.mark.parametrize("protocol", range(2, 6))
def test_metadata_is_read_as_torch_reads_it(
    protocol: int, reduced: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda one, _: reduced(one))
    place, _ = saved(tmp_path)
    theirs = pickle.loads((place / ".metadata").read_bytes())
    (place / ".metadata").write_bytes(pickle.dumps(theirs, protocol=protocol))
    assert (b"getattr" in (place / ".metadata").read_bytes()) == (reduced is by_attribute)
    ours = read_metadata(*at(place, ".metadata"))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data


@pytest.mark.parametrize(
    ("owner", "name", "told"),
    [
        (_MEM_FORMAT_ENCODING, "__class__", "malformed"),
        (_MEM_FORMAT_ENCODING, ["TORCH_PRESERVE_FORMAT"], "malformed"),
        (TensorProperties, "__setstate__", "names an attribute"),
        (torch.Size, "numel", "names an attribute"),
        ("text", "format", "names an attribute"),
    ],
)
def test_no_attribute_is_read_but_a_member_of_that_enum(
    owner: Any, name: Any, told: str, tmp_path: Path
) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(pickle_payloads.Call(getattr, owner, name)))
    with pytest.raises(CheckpointError, match=told):
        read_metadata(Directory(tmp_path), ".metadata")


def test_the_results_of_writing_are_no_pickle(tmp_path: Path) -> None:
    staged = Staged(is_alone=True)
    digest, plan = staged.plan(Objects(trained()).sharded())
    staged.agree(digest, [plan], 1)
    staged.copy(0)
    storage = Directory(tmp_path)
    storage.begin("step")
    staged.write(storage, "step", 0)
    marker = tmp_path / "made"
    storage.write("step/parts/results-0", pickle_payloads.review(f"touch {marker}"))
    with pytest.raises(ValueError, match=r"."):
        staged.finish(storage, "step")
    assert not marker.exists()


class Part:
    """A user's part whose state is what it is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return {"inner": self.state}

    def load_state_dict(self, state: Any) -> None:
        self.state = state["inner"]


def test_what_restore_would_refuse_is_refused_by_save(tmp_path: Path) -> None:
    checkpoints = worker.checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match=r"objects\['part'\]\['inner'\] holds a .*Part"):
        checkpoints.save(1, part=Part(Part(1)))
    with pytest.raises(CheckpointError, match=r"extra\['a'\]\[0\] holds a .*function"):
        checkpoints.save(1, extra={"a": [len]}, part=Part(1))
    objects = trained()
    objects["optimizer"].param_groups[0]["hook"] = Part(1)
    with pytest.raises(CheckpointError, match=r"optimizer.*hook is a .*Part"):
        checkpoints.save(1, **objects)


def test_own_state_comes_back_and_so_does_that_of_older_releases(tmp_path: Path) -> None:
    numbers = np.random.default_rng(1).random(4)
    extra = {"numbers": numbers, "order": [3, 1], ("a", 1): {2}, "t": torch.ones(2, 2).t()}
    place, objects = saved(tmp_path, extra=extra, rng=True, part=Part((1, "x")))
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    part = Part(None)
    found = Checkpoints.restore(worker.checkpoints(tmp_path), **objects, part=part)
    assert found is not None
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    assert part.state == (1, "x")
    assert np.array_equal(found.extra["numbers"], numbers)
    assert found.extra[("a", 1)] == {2}
    assert isinstance(objects["optimizer"].param_groups[0]["lr"], float)
    content = {"objects": {"part": {"inner": 5}}, "rng": generators(), "extra": {"n": numbers}}
    torch.save(content, place / "rank-00000.pt")
    (place / own_name(0)).unlink()
    assert np.array_equal(Objects({"part": part}).load_own(*at(place), 0)["n"], numbers)
    assert part.state == 5
    with pytest.raises(CheckpointError):
        load_plain(place / "nothing", "nothing")
