"""As gang.py, but it tells its agent of a first step, from which on warm workers are made ready."""

import runpy
from pathlib import Path

from unbroken import worker

worker.progress(1)
runpy.run_path(str(Path(__file__).with_name("gang.py")), run_name="__main__")
