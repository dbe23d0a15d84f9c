import sys

import pytest

from appliance.models import maker_process

KILLED = 'import os, signal; print(\'{"event": "step"}\', flush=True); os.kill(os.getpid(), signal.SIGKILL)'


def test_a_pretraining_that_the_kernel_killed_is_told_as_such_and_not_by_a_negative_code(monkeypatch):
    real = maker_process.subprocess.Popen
    monkeypatch.setattr(
        maker_process.subprocess, "Popen", lambda _, **rest: real([sys.executable, "-c", KILLED], **rest)
    )
    with pytest.raises(maker_process.MakerFailed, match="most likely by the kernel for want of memory") as error:
        maker_process._run("train.starter.main", [], lambda event: None)
    assert "-9" not in str(error.value)
    assert not str(error.value).endswith(": ")
