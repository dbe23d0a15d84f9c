"""Runs worlds of two ranks and engines of two workers on one GPU, to test NCCL groups, deaths and time limits.

NCCL refuses two ranks on one GPU if their NCCL_HOSTID is the same. If the ids differ, NCCL treats them as ranks on two
machines and connects them by sockets on `lo`, without NVLink (libnccl 2.29.7, tried on an H100).

    python -m benchmarks.gpu.one_card.worlds cuda [PART ...]
    python -m benchmarks.gpu.one_card.engines cuda [PART ...]
"""
