"""The parts of parameters that this rank owns under ZeRO (fragments), as torch tensors. No other file uses DeepSpeed's
private attributes (pinned: 0.19.8; tests/integration/train/test_deepspeed_contract.py notices when they change).

ZeRO cuts parameters without regard to their shapes, so a fragment is a range of the flattened parameter (under tensor
parallelism, of the flattened slice on this rank). The fragments that all ranks write (`written`) cover every parameter
exactly once; snapshot and publish copy fragments and need no collective.

The optimizers behind the three stages:
- stage 1 in bf16 with fp32 accumulation is BF16_Optimizer, everything else of stages 1 and 2 is
  DeepSpeedZeroOptimizer; both map each parameter to its fragment in `_hp_mapping`;
- stage 3 keeps `ceil(numel / world)` elements of each parameter per rank, the last ones padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed import comm
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

from train.model.model import checkpoint_name
from train.model.tensor_parallel import Grid
from weights.format.torch_views import Strided, narrow, part

MOMENTS = ("exp_avg", "exp_avg_sq")
_WRAPPER = "model."  # packed_objective.PackedObjective holds the model under this name


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model: `name` as in its checkpoint, `shape` of the whole, however ZeRO has cut the tensor.

    held: elements of the flattened whole on this rank; without tensor parallelism all of them.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool
    tensor: torch.nn.Parameter
    held: Strided

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + numel) of this rank's slice of the flattened parameter `name`.

    weights: (numel,), the fp32 master if trained, else the frozen weights in the precision of the run.
    moments: exp_avg and exp_avg_sq, (numel,) float32; empty if frozen or before the first step.
    held: elements of the flattened whole that make up the slice.
    """

    name: str
    start: int
    weights: torch.Tensor
    moments: dict[str, torch.Tensor]
    held: Strided

    @property
    def numel(self) -> int:
        return self.weights.numel()

    def pieces(self) -> Iterator[tuple[Strided, slice]]:
        """Elements of the flattened whole, each with the same elements of this fragment; without tensor parallelism in
        one piece."""
        at = 0
        for runs in part(self.held, self.start, self.numel):
            yield runs, slice(at, at + runs.size)
            at += runs.size

    def narrow(self, first: int, last: int) -> Fragment:
        """Return elements [first, last) of this fragment, as a view."""
        moments = {key: moment[first:last] for key, moment in self.moments.items()}
        return replace(self, start=self.start + first, weights=self.weights[first:last], moments=moments)


def parameters(engine: Any) -> list[Parameter]:
    """All parameters in model order, tied ones once, the same list on every rank."""
    items = []
    tensor_rank = grid(engine).tensor_rank
    for name, tensor in engine.module.named_parameters():
        shape, held = _whole_and_held(tensor, tensor_rank)
        items.append(Parameter(checkpoint_name(name.removeprefix(_WRAPPER)), shape, tensor.requires_grad, tensor, held))
    return items


def grid(engine: Any) -> Grid:
    """The place of this rank in the grid of data and tensor parallelism."""
    return Grid(comm.get_rank(), comm.get_world_size(), max(1, engine.autotp_size()))


def _whole_and_held(tensor: torch.nn.Parameter, tensor_rank: int) -> tuple[tuple[int, ...], Strided]:
    meta = getattr(tensor, DS_AUTOTP_UC_META, None)
    if meta is None or meta["replicated"]:  # the bias of a matrix that is cut by columns is whole on every rank
        shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
        numel = torch.Size(shape).numel()
        return shape, Strided(0, numel, numel, 1)
    shape, dim, sizes = meta["logical_shape"], meta["partition_dim"], meta["partition_sizes"]
    return shape, narrow(shape, dim, sum(sizes[:tensor_rank]), sizes[tensor_rank])


def written(engine: Any, owned: Iterable[Fragment]) -> Iterator[Fragment]:
    """The parts of fragments that this rank writes. Of a parameter that every rank of a tensor-parallel group holds
    whole, each rank writes a share; of all others, the whole fragment."""
    place = grid(engine)
    whole = {p.name for p in parameters(engine) if p.held.size == p.numel} if place.tensor_parallel > 1 else set()
    for fragment in owned:
        first, last = place.share(fragment.numel) if fragment.name in whole else (0, fragment.numel)
        if first < last:
            yield fragment.narrow(first, last)


def trained_fragments(engine: Any) -> Iterator[Fragment]:
    """This rank's fragments of the trained parameters, as views of the optimizer's own memory."""
    masters, states = _flat_masters(engine), engine.optimizer.optimizer.state
    for parameter in parameters(engine):
        if not parameter.trained or (place := _place(engine, parameter.tensor)) is None:
            continue
        group, at, start, numel = place
        # Not mapping.optim_fragment: ZeRO-2 fills it once, after the step of the first parameter group, when the other
        # groups have no state yet.
        state = states.get(masters[group]) or {}
        moments = {key: state[key].narrow(0, at, numel) for key in MOMENTS if key in state}
        weights = masters[group].detach().narrow(0, at, numel)
        yield Fragment(parameter.name, start, weights, moments, parameter.held)


def _place(engine: Any, tensor: torch.nn.Parameter) -> tuple[int, int, int, int] | None:
    """The place of this rank's fragment: (parameter group, first element in the group's flat master, first element in
    the rank's slice of the parameter, number of elements). None if it has none."""
    optimizer = engine.optimizer
    if is_zero3(engine):
        group, at, size = optimizer.grad_position[optimizer.get_param_id(tensor)]
        start = size * optimizer._get_param_partition_rank(tensor)
        numel = min(size, tensor.ds_numel - start)  # the rest is padding
        return (group, at, start, numel) if numel > 0 else None
    if (mapping := getattr(tensor, "_hp_mapping", None)) is None:
        return None
    address = mapping.hp_fragment_address
    return mapping.param_group_index, address.start, mapping.lp_fragment_address.start, address.numel


def frozen_fragments(engine: Any) -> Iterator[Fragment]:
    """This rank's fragments of the frozen parameters: its partition under ZeRO-3, else an even share of the replica."""
    place = grid(engine)
    for parameter in parameters(engine):
        if parameter.trained:
            continue
        if is_zero3(engine):
            partition = parameter.tensor.ds_tensor
            start = partition.ds_numel * place.data_rank
            weights = partition.data.view(-1)[: max(0, parameter.numel - start)]
        else:
            edges = (place.data_rank, place.data_rank + 1)
            start, end = (parameter.held.size * edge // place.data_size for edge in edges)
            weights = parameter.tensor.detach().view(-1)[start:end]
        if weights.numel():
            yield Fragment(parameter.name, start, weights, {}, parameter.held)


def is_zero3(engine: Any) -> bool:
    return hasattr(engine.optimizer, "fp32_partitioned_groups_flat")


def create_moments(engine: Any, step: int) -> None:
    """Give the optimizer the Adam state of `step` steps, for fragments to be copied into; existing moments stay."""
    state = engine.optimizer.optimizer.state
    for flat in _flat_masters(engine):
        moments = {key: state[flat][key] for key in MOMENTS if key in (state.get(flat) or {})}
        # torch's fused Adam reads the step in its kernel, so it must be on the device of the parameter.
        state[flat] = {"step": torch.tensor(float(step), dtype=torch.float32, device=flat.device)}
        state[flat] |= moments or {key: torch.zeros_like(flat, requires_grad=False) for key in MOMENTS}


def gather_weights(engine: Any) -> None:
    """Collective under ZeRO-3: copy the masters into the weights that the model computes with."""
    optimizer = engine.optimizer
    for group in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    persistent = optimizer.persistent_parameters
    if persistent:
        persistent[0].all_gather(persistent)


def sum_gradients(engine: Any) -> None:
    """Make the engine add the ranks' gradients instead of averaging them.

    The loss is already divided by the learnt tokens of the global step. A division by the world size in bf16 is exact
    for powers of two only, so the loss curve would depend on the number of devices.
    """
    engine.gradient_average = False
    if is_zero3(engine):
        engine.optimizer._gradient_averaging_world_size = lambda params, partition_world_size: 1
    else:
        engine.optimizer.gradient_average = False


def coarsen_clipping(engine: Any) -> None:
    """Clip by the gradient norm rounded to 13 bits, which is the same on any number of ranks.

    A sum of a few bf16 gradients in fp32 is nearly always exact in any order; the norm, summed by partition, is not.
    Its last bit scales every gradient and eventually changes a bf16 weight: the loss curves of two world sizes agreed
    to 1e-7 for some ten steps and to 1e-4 afterwards. BF16_Optimizer takes the norm of whole gradients, which is the
    same in any world.
    """
    optimizer = engine.optimizer
    if is_zero3(engine):
        exact_groups = optimizer._get_norm_groups
        optimizer._get_norm_groups = lambda: [_rounded(norm) for norm in exact_groups()]
    elif hasattr(optimizer, "scaled_global_norm"):
        exact = optimizer.scaled_global_norm
        optimizer.scaled_global_norm = lambda *args, **kwargs: _rounded(exact(*args, **kwargs))


def _rounded(norm: torch.Tensor | float) -> torch.Tensor:
    mantissa, exponent = torch.frexp(torch.as_tensor(norm, dtype=torch.float32))
    return torch.ldexp(torch.round(mantissa * 8192) / 8192, exponent)


def _flat_masters(engine: Any) -> list[torch.Tensor]:
    optimizer = engine.optimizer
    for attribute in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, attribute):
            return getattr(optimizer, attribute)
    raise TypeError(f"{type(optimizer).__name__} has its master weights under an unknown attribute")
