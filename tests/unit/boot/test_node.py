"""The process of a node that joins."""

from __future__ import annotations

import subprocess
import sys


def test_ray_is_imported_after_its_settings_are_in_the_environment():
    """Else it joined without the token and was refused."""
    program = "import sys, appliance.boot.node; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
