"""Tests of the CUDA build on a machine without a GPU: stub drivers, and imports before a fork."""
