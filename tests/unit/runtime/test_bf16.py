"""Which processors compute in bfloat16 and quantised layers, by the text that the kernel shows of them."""

import pytest

from runtime.devices.cpu import bf16_in, lacking_in

ZEN3 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx avx2 fma sha_ni\nbugs\t\t: avx512_bf16\n"
ZEN4 = ZEN3.replace("sha_ni", "avx512f avx512_bf16")
GRAVITON3 = "processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\n"
GRAVITON2 = "processor\t: 0\nFeatures\t: fp asimd\n"


@pytest.mark.parametrize(("cpuinfo", "found"), [(ZEN3, False), (ZEN4, True), (GRAVITON3, True), (GRAVITON2, False)])
def test_bf16_is_read_off_the_processors_flags(cpuinfo, found):
    assert bf16_in(cpuinfo) is found


@pytest.mark.parametrize(("cpuinfo", "lacks"), [(ZEN3, "AVX-512"), (ZEN4, ""), (GRAVITON3, ""), (GRAVITON2, "")])
def test_what_a_processor_lacks_for_quantised_layers_is_read_off_them_too(cpuinfo, lacks):
    assert lacking_in(cpuinfo) == lacks
