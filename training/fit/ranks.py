"""Data-parallel training with torchrun: every rank uses the same draws of the weights for its share of each batch."""

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # variables that torchrun sets


@dataclass(frozen=True)
class Ranks:
    count: int = 1
    index: int = 0

    @classmethod
    def here(cls) -> "Ranks":
        """The ranks of torchrun; without it, a single one."""
        if not all(name in os.environ for name in ENVIRONMENT):
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
            atexit.register(dist.destroy_process_group)
        return cls(dist.get_world_size(), dist.get_rank())

    @staticmethod
    def device() -> torch.device:
        """This rank's GPU, or the CPU."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device

    def prepare(self, network: nn.Module) -> Callable[[], None]:
        """Copy the first rank's parameters to all, and replace BatchNorms by ones that use the whole batch.

        The returned function puts the network's own BatchNorms back, with the learned statistics.
        """
        swapped: list[tuple[nn.Module, str, nn.Module]] = []

        def undo() -> None:
            for parent, name, child in swapped:
                setattr(parent, name, child.train(parent.training))

        if self.count == 1:
            return undo
        for tensor in network.state_dict().values():
            dist.broadcast(tensor, 0)
        for parent in list(network.modules()):
            for name, child in parent.named_children():
                if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                    swapped.append((parent, name, child))
                    on_gpu = next(network.parameters()).is_cuda
                    shared = nn.SyncBatchNorm.convert_sync_batchnorm(child) if on_gpu else SharedBatchNorm(child)
                    setattr(parent, name, shared)
        return undo

    def add_gradients(self, network: nn.Module) -> None:
        """Sum each gradient over ranks, with one all-reduce."""
        if self.count == 1:
            return
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(part.view_as(g))

    def add(self, values: Tensor) -> Tensor:
        """The sum over ranks."""
        if self.count > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run the block on the first rank, then on the others, which find what the first has downloaded."""
        if self.count > 1 and self.index > 0:
            dist.barrier()
        yield
        if self.count > 1 and self.index == 0:
            dist.barrier()

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set on any rank, so that all ranks decide alike."""
        return flag if self.count == 1 else bool(self.add(torch.tensor(float(flag), device=device)))

    def same(self, number: int, device: torch.device) -> bool:
        """Whether all ranks have the same number."""
        return self.count == 1 or not self.any(self.of_first([number], device) != [number], device)

    def of_first(self, values: Sequence[float], device: torch.device) -> list[float]:
        """The first rank's values, on all ranks."""
        if self.count == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64, device=device)
        dist.broadcast(shared, 0)
        return shared.tolist()


class Sum(torch.autograd.Function):
    """Differentiable sum of a tensor over ranks: each rank's loss depends on every rank's summand."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor) -> Tensor:
        total = summand.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Sum.apply(gradient)  # type: ignore[no-any-return]


class SharedBatchNorm(_BatchNorm):
    """A BatchNorm over the batches of all ranks, for CPUs; torch's own SyncBatchNorm is for GPUs only."""

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self._parameters, self._buffers = norm._parameters, norm._buffers
        self.train(norm.training)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        rows = input.transpose(0, 1).flatten(1)  # (C, n)
        ones = rows.new_full((1,), rows.shape[1])
        *sums, n = Sum.apply(torch.cat([rows.sum(1), ones])).split([len(rows), 1])
        mean = sums[0] / n
        var: Tensor = Sum.apply((rows - mean[:, None]).square().sum(1)) / n
        if self.running_mean is not None and self.running_var is not None:
            self._remember(mean.detach(), var.detach() * n / (n - 1))
        shape = (1, -1) + (1,) * (input.dim() - 2)
        out: Tensor = (input - mean.view(shape)) * (var + self.eps).rsqrt().view(shape)
        return out * self.weight.view(shape) + self.bias.view(shape) if self.affine else out

    @torch.no_grad()
    def _remember(self, mean: Tensor, var: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(var, momentum)

    def _check_input_dim(self, input: Tensor) -> None:
        """The replaced BatchNorm has checked it."""
