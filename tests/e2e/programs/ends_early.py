"""Ends before it waits for its rank: by an import that fails, or by an exit code."""

from __future__ import annotations

import os
import sys

if os.environ["ENDS"] == "import":
    import no_such_module  # noqa: F401
sys.stderr.write("the configuration is missing\n")
sys.exit(int(os.environ["ENDS"]))
