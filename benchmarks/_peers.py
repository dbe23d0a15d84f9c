"""Libraries that figures are compared with, which the box does not need: each in a folder of its own, beside the
environment of the box, whose torch and transformers they share.

The folders are made once, by pip and with the settings that pip has here, under `build/peers`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "build" / "peers"
PACKAGES = {
    "trl": (
        "trl==1.16.0",
        "datasets==5.2.0",
        "pyarrow==26.0.1",
        "pandas==3.1.1",
        "multiprocess==0.70.19",
        "dill==0.4.1",
        "xxhash==4.1.0",
    ),
}


class NotInstalled(Exception):
    """pip could not install a peer; says what it said."""


def path(name: str) -> Path:
    """The folder to put on the import path for this peer, made where it is not there. Raises NotInstalled."""
    home = (
        FOLDER / name / "site-packages"
    )  # dill takes what does not lie in a folder of this name for the user's own code
    if home.is_dir():
        return home
    print(f"installing {' '.join(PACKAGES[name])} into {home}", flush=True)
    unfinished = home.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(unfinished)]
    done = subprocess.run([*command, *PACKAGES[name]], capture_output=True, text=True)
    if done.returncode:
        raise NotInstalled(f"{name} is not installed: {done.stderr.strip()[-300:]}")
    unfinished.rename(home)
    return home
