"""Write deploy/crds/, and the chart's copy, from the dataclasses of unbroken.spec."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from unbroken.spec.schema.crd import definitions

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "deploy/crds", ROOT / "deploy/helm/unbroken/files/crds")
"""Folders of the definitions: a chart reads no file outside its own folder."""
HEAD = "# Written by tools/crds.py from src/unbroken/spec; do not edit.\n"


def files() -> Mapping[Path, str]:
    """Return the content of each file in the folders."""
    return {
        folder / f"{made['metadata']['name']}.yaml": HEAD
        + yaml.dump(made, Dumper=_Plain, sort_keys=False, width=100)
        for folder in FOLDERS
        for made in definitions()
    }


class _Plain(yaml.SafeDumper):
    """Dumper without anchors, since readers of a CRD expect none."""

    def ignore_aliases(self, data: object) -> bool:
        return True


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT))
