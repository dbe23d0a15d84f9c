"""CPU support for bfloat16 and quantised layers, read from /proc/cpuinfo."""

import pytest

from runtime.devices import kind
from runtime.devices.kinds import kind_of

ZEN3 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse2 avx2 fma sha_ni\nbugs\t\t: avx512_bf16\n"
ZEN4 = ZEN3.replace("sha_ni", "avx512f avx512_bf16")
GRAVITON3 = "processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\n"
GRAVITON2 = "processor\t: 0\nFeatures\t: fp asimd\n"


@pytest.mark.parametrize(
    ("cpuinfo", "bf16", "lacks"),
    [(ZEN3, False, "AVX-512"), (ZEN4, True, ""), (GRAVITON3, True, ""), (GRAVITON2, False, "")],
)
def test_cpu_flags_determine_supported_dtypes(monkeypatch, tmp_path, cpuinfo, bf16, lacks):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(kind, "_CPUINFO", tmp_path / "cpuinfo")
    kind.host_features.cache_clear()
    assert (kind_of("cpu").computes_bf16(), kind_of("cpu").lacks_for_quantised()) == (bf16, lacks)
    kind.host_features.cache_clear()
