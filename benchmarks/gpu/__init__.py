"""`make gpu-smoke`: compares the performance of a machine with GPUs with the limits of its parts, in ten minutes."""
