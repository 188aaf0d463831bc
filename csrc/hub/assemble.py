"""Assemble the source folder of a Hugging Face kernels repository: python csrc/hub/assemble.py FOLDER

FOLDER, which must not exist yet, gets build.toml, LICENSE and torch-ext/viasd_kernels.
"""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT = (".py", ".json", ".md")


def assemble(folder: Path) -> None:
    package = folder / "torch-ext" / "viasd_kernels"
    for source in sorted((ROOT / "viasd_kernels").rglob("*")):
        if source.suffix in KEPT:
            target = package / source.relative_to(ROOT / "viasd_kernels")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    shutil.copyfile(ROOT / "csrc" / "hub" / "build.toml", folder / "build.toml")
    shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")


if __name__ == "__main__":
    if len(sys.argv) != 2 or Path(sys.argv[1]).exists():
        sys.exit(__doc__)
    assemble(Path(sys.argv[1]))
