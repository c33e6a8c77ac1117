"""Worker as gang.py, which reports a first step to its agent: warm workers are prepared then."""

import runpy
from pathlib import Path

from unbroken import worker

worker.progress(1)
runpy.run_path(str(Path(__file__).with_name("gang.py")), run_name="__main__")
