"""Become a worker: `python -u boot.py run KIND ARGS...`, or be the template of workers.

The worker's interpreter runs this file by path and need not have unbroken installed. The same holds
for the files next to it that it loads. They use the standard library only, and leave nothing in
`sys.path` or `sys.modules`. wire/warm.py has the messages, docs/design/fast-recovery.md the
reasons.

`template FD KIND ARGS...` serves the agent at the other end of FD. It continues below only in a
process that was forked from it and has its order. Both then end as the user's program does: by the
interpreter, at the end of this file, with a `__main__` in which nothing of this file is left.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

_shown = {*sys.modules}


def _beside(path: str, directory: str = __file__.rpartition("/")[0]) -> ModuleType:
    """Load a file of this package, named from this directory."""
    from _frozen_importlib_external import SourceFileLoader

    name = "unbroken." + path.rpartition("/")[2]
    module = type(sys)(name)
    module.__file__ = f"{directory}/{path}.py"
    SourceFileLoader(name, module.__file__).exec_module(module)
    return module


if __name__ == "__main__":
    # Before any import: this directory is not the user's.
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path_importer_cache.pop(sys.path.pop(0), None)
    sys.path_importer_cache.pop(__file__, None)
    _becoming = _beside("becoming")
    _begin = sys.orig_argv[: -len(sys.argv)]
    if sys.argv[1] == "template":
        _served = _beside("template").serve(_beside, _begin, sys.argv[2:], _shown)
        _position, _order = _served
    else:
        _position, _order = 0, sys.argv[2:]
        _beside("learning").learn(_beside("../../wire/warm").LEARNT_VARIABLE)
    _becoming.become(globals(), _begin, _position, _order, _beside("keepers").let_go)
