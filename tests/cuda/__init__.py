"""The CUDA build of the packages on a machine without a GPU: stub drivers, and what may be imported before a fork."""
