"""`make gpu-smoke`: compares measured rates of a GPU machine with the limits of its hardware, in ten minutes."""
