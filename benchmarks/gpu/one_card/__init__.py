"""Worlds of two ranks and engines of two workers on one GPU: NCCL's groups, deaths and time limits without a second.

NCCL refuses two ranks on one GPU where their NCCL_HOSTID is the same. Where it differs it takes them for ranks on two
machines and joins them by sockets on `lo` (libnccl 2.29.7, tried on an H100). NVLink is not there.

    python -m benchmarks.gpu.one_card.worlds cuda [PART ...]
    python -m benchmarks.gpu.one_card.engines cuda [PART ...]
"""
