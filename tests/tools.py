"""Programs of `tools/`, which are no modules of a package."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from tests.apiservers import ROOT


def tool(name: str) -> Any:
    """Import a program of `tools/` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module
