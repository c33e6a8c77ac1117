"""`make check` refuses whatever would run code from data, however it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tools import tool

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checker() -> Any:
    """tools/banned_calls.py."""
    return tool("banned_calls")


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as json",
        "import _pickle",
        "from pickle import loads as read",
        "import marshal, shelve",
        "import dill",
        "import copyreg",
        "from multiprocessing.connection import Client",
        "import multiprocessing as mp",
        "import torch.multiprocessing",
        "import pandas\npandas.read_pickle('a')",
        "from importlib import import_module\nimport_module('pickle')",
        "from importlib import import_module\nimport_module('pic' + 'kle')",
        "from importlib import import_module\nimport_module(f'pickle')",
        "from importlib import import_module\nname = input()\nimport_module(name)",
        "import importlib\nimportlib.import_module('cloudpickle')",
        "__import__('pickle')",
        "import sys\nsys.modules['pickle']",
        "import builtins",
        "globals()['__builtins__']",
        "import torch\ntorch.load('a')",
        "import torch\ntorch.load('a', weights_only=False)",
        "import torch\nonly = True\ntorch.load('a', weights_only=only)",
        "import torch as t\nt.load('a')",
        "import torch as json\njson.load('a')",
        "import torch\nread = torch.load\nread('a')",
        "import torch\ngetattr(torch, 'load')('a')",
        "import torch\ngetattr(torch, 'lo' + 'ad')('a')",
        "from operator import attrgetter\nattrgetter('load')",
        "from torch import load",
        "from importlib import import_module\nimport_module('torch').load('a')",
        "import torch\ntorch.serialization._legacy_load('a')",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "from torch.distributed import recv_object_list",
        "import yaml\nyaml.load('a')",
        "import yaml\nyaml.load('a', Loader=yaml.Loader)",
        "import yaml\nyaml.load('a', yaml.UnsafeLoader)",
        "import yaml\nyaml.unsafe_load('a')",
        "from yaml import load",
        "import numpy\nnumpy.load('a', allow_pickle=True)",
        "import numpy\nnumpy.load('a')",
        "eval('1')",
        "exec('1')",
        "run = eval",
        "compile('1', 'a', 'exec')",
        "class A:\n    def __reduce__(self): ...",
        "from os import *",
        "import runpy",
        "from importlib.machinery import SourceFileLoader",
    ],
)
def test_it_is_found(checker: Any, source: str) -> None:
    assert list(checker.findings(source))


@pytest.mark.parametrize(
    "source",
    [
        "import json\njson.loads('1')",
        "import torch\ntorch.load('a', weights_only=True)",
        "import yaml\nyaml.load('a', Loader=yaml.CSafeLoader)",
        "import re\nre.compile('a')",
        '"""pickle"""',
        "verb = 'exec'",
        "from importlib import import_module\nimport_module('torch')",
    ],
)
def test_what_is_plain_is_not(checker: Any, source: str) -> None:
    assert list(checker.findings(source)) == []


def test_the_package_has_none_and_no_exception_is_left_over(checker: Any) -> None:
    assert checker.examine([ROOT / "src"]) == []
