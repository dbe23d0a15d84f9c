"""Fine-tuning on DeepSpeed: from a checked data file to a version in shared memory.

Reading order: data_check -> auto -> spec -> data -> packing -> model -> objectives -> loop -> worker -> group.
`data_check`, `formats`, `auto`, `spec`, `schedule`, `rank_host` and `group` import no torch; everything that does
runs in ranks forked from the warm parent that has `train.run.preload` imported.
"""
