"""The training objective: negative log-likelihood over draws, plus the weighted KL; schedules of its weights."""

import math

import torch.nn.functional as F
from torch import Tensor

from dubito.models.network.network import BayesianNetwork
from dubito.models.predictions.uncertainty import log_ratio
from dubito.training.config import Fit


def negative_log_likelihood(network: BayesianNetwork, outputs: Tensor, y: Tensor) -> Tensor:
    """Mean over draws and examples: (K, B, …) outputs; classes (B,), or targets (B, D) in the network's units."""
    outputs = outputs.float()
    if network.noise is None:
        return F.cross_entropy(outputs.flatten(0, 1), y.repeat(len(outputs)))
    D = y.shape[-1]
    log_std: Tensor = network.noise().log()
    if network.gain is not None:
        log_std = log_std + network.gain * log_ratio(outputs[..., D:])
    squared = ((outputs[..., :D] - y) * (-log_std).exp()).square()
    return (squared / 2 + log_std + math.log(2 * math.pi) / 2).sum(-1).mean()


def kl_weight(fit: Fit, epoch: float) -> float:
    """Weight of the KL: 0 in the likelihood phase, then a linear rise to `fit.kl`; `epoch` may be a fraction."""
    if epoch < fit.likelihood_epochs:
        return 0.0
    if fit.warmup_epochs == 0:
        return fit.kl
    return fit.kl * min(1.0, (epoch - fit.likelihood_epochs) / fit.warmup_epochs)


def gain(fit: Fit, epoch: float) -> float:
    """Gain of target noise that depends on the input: 0 for `noise_epochs`, then a linear rise to 1."""
    return 1.0 if fit.noise_epochs == 0 else min(1.0, max(0.0, epoch / fit.noise_epochs - 1))


def rate(fit: Fit, epoch: float) -> float:
    """Learning rate; `epoch` may be a fraction."""
    match fit.schedule:
        case "cosine":
            return fit.lr * (1 + math.cos(math.pi * epoch / fit.epochs)) / 2
        case "step":
            return fit.lr * 0.1 ** sum(epoch >= m for m in fit.milestones)
        case "constant":
            return fit.lr
