"""Liger's fused kernels (Hsu et al., 2024; linkedin/Liger-Kernel) for a model's norms, rotary embedding and MLPs.

They keep fewer activations than torch's operations one by one. The output head has a kernel of its own already
(train.methods.packed_objective), so Liger's is left out. They are Triton's, so they need a GPU.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from train.plan.errors import UnsupportedModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose gradients tests compare with torch's


def use_liger(model: PreTrainedModel) -> None:
    """Change the model's layers in place, and its family's rotary embedding for the whole process. Raises
    UnsupportedModel for another family."""
    if model.config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedModel(f"kernels 'liger' does not know {model.config.model_type}, only {known}: take 'torch'")
    # Its import takes a second, and few jobs need it.
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance  # noqa: PLC0415

    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
