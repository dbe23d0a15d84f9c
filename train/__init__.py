"""Fine-tuning on DeepSpeed: from a checked data file to a version in shared memory.

Reading order: data_checks.check -> plan.auto -> plan.spec -> data.token_set -> model.model -> trainer.train ->
state.snapshot -> control.group. `data_checks.check`, `data.formats`, `plan` and `control.group` import no torch; the
rest runs in ranks, forked from the warm parent, which has imported `train.trainer.preload`.
"""
