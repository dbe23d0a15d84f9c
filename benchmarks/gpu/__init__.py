"""`make gpu-smoke`: what a machine with GPUs can do, against what its parts allow, in ten minutes."""
