"""Page locking by torch's CUDA runtime, with a stand-in for its library."""

import pytest
import torch  # noqa: F401 - before its own use of ctypes is replaced

from runtime.devices import cuda
from runtime.devices.cuda import loaded
from runtime.devices.kinds import kind_of

REFUSED = 712  # cudaErrorHostMemoryAlreadyRegistered
MAPS = """\
7f10-7f20 r-xp 00000000 08:01 11 /v/site-packages/tilelang/lib/libcudart_stub.so
7f20-7f30 r-xp 00000000 08:01 12 /v/libcudart.so.d/libc.so.6
7f30-7f40 rw-p 00000000 00:00 0
7f40-7f50 r-xp 00000000 08:01 13 /v/site packages/nvidia/cu13/lib/libcudart.so.13
"""


class Call:
    def __init__(self, answers):
        self.answers, self.asked, self.argtypes = answers, [], None

    def __call__(self, *given):
        assert len(given) == len(self.argtypes)
        self.asked.append(given)
        return self.answers(*given)


class Library:
    """A stand-in that keeps an error until it is read, as the CUDA runtime does."""

    def __init__(self):
        self.locked, self.error = {}, 0
        self.cudaHostRegister, self.cudaHostUnregister = Call(self._register), Call(self._unregister)
        self.cudaGetLastError = Call(self._take)

    def _register(self, address, nbytes, flags):
        assert flags == 0
        self.error = REFUSED if address in self.locked else self.error
        self.locked.setdefault(address, nbytes)
        return self.error

    def _unregister(self, address):
        self.error = 0 if self.locked.pop(address, None) else REFUSED
        return self.error

    def _take(self):
        self.error, before = 0, self.error
        return before


def test_page_lock_refusal_returns_false_and_clears_error(monkeypatch):
    asked, library = [], Library()
    monkeypatch.setattr(cuda, "loaded", lambda name: asked.append(name) or f"/lib/{name}.so")
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda path: library)
    pages = kind_of("cuda").page_lock()
    assert asked == ["libcudart"]
    assert pages.lock(2**46, 16 * 2**20) and library.locked == {2**46: 16 * 2**20}
    assert not pages.lock(2**46, 4096)
    assert library.error == 0
    pages.unlock(2**46)
    pages.unlock(2**46)
    assert not library.locked and library.error == 0


def test_loaded_returns_path_of_mapped_library(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda, "_MAPS", tmp_path / "maps")
    (tmp_path / "maps").write_text(MAPS)
    assert loaded("libcudart") == "/v/site packages/nvidia/cu13/lib/libcudart.so.13"
    with pytest.raises(RuntimeError, match="libhsa is not loaded in this process.*names the build"):
        loaded("libhsa")
