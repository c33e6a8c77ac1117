"""Write deploy/crds/ from the dataclasses of unbroken.spec: `python tools/crds.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from unbroken.spec.schema import definitions

FOLDER = Path(__file__).parents[1] / "deploy/crds"
HEAD = "# Written by tools/crds.py from src/unbroken/spec; do not edit.\n"


def files() -> Mapping[Path, str]:
    """What the folder should hold."""
    return {
        FOLDER / f"{made['metadata']['name']}.yaml": HEAD
        + yaml.dump(made, Dumper=_Plain, sort_keys=False, width=100)
        for made in definitions()
    }


class _Plain(yaml.SafeDumper):
    """Writes what occurs twice twice: readers of a CRD expect no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in files().items():
        path.write_text(text)
        print(path.relative_to(FOLDER.parents[1]))
