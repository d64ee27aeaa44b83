"""Data-parallel training under torchrun: every rank draws the same weights for its share of each batch."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Ranks:
    count: int = 1
    index: int = 0

    @classmethod
    def here(cls) -> "Ranks":
        """As torchrun says; without it, one process."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        return cls(dist.get_world_size(), dist.get_rank())

    @staticmethod
    def device() -> torch.device:
        """This rank's GPU, where there are any."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device

    def prepare(self, network: nn.Module) -> None:
        """BatchNorm over the whole batch, as in one process; torch has that for GPUs only."""
        if self.count > 1 and torch.cuda.is_available():
            nn.SyncBatchNorm.convert_sync_batchnorm(network)

    def add_gradients(self, network: nn.Module) -> None:
        """Each gradient becomes the sum over ranks, all of them in one message."""
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
