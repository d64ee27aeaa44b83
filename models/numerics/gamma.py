"""Gamma variables made from standard normals: a function of the normals, with gradients in the shape."""

import torch
from torch import Tensor

TRIES = 8  # each is accepted with a probability above 0.95
NORMALS = 2 * TRIES  # of one Gamma variable


def gamma(noise: Tensor, shape: Tensor) -> Tensor:
    """Gamma(shape, rate 1) from normals (..., NORMALS), for shapes (...) from 1 on [Marsaglia00].

    x = d (1 + c z)³ with d = shape − 1/3, c = 1/√(9 d) is accepted if log u < z²/2 + d − x + d log(x/d). The first
    accepted of TRIES pairs (z, u) is taken; that none is has a probability below 4e-11. The gradient is that of the
    quantile function, −(∂F/∂shape)/(∂F/∂x) for the distribution function F, as torch's own Gamma has it.
    """
    a = shape.detach().expand(noise.shape[:-1])
    with torch.no_grad():
        z, u = noise.to(a.dtype).unflatten(-1, (TRIES, 2)).unbind(-1)
        d = (a - 1 / 3)[..., None]
        v = (1 + z / (9 * d).sqrt()) ** 3
        log_v = v.clamp(min=torch.finfo(v.dtype).tiny).log()
        accepted = (v > 0) & (torch.special.log_ndtr(u) < z.square() / 2 + d - d * v + d * log_v)
        first = accepted.byte().argmax(-1, keepdim=True)  # 0 where none is
        x: Tensor = (d * v.gather(-1, first).clamp(min=torch.finfo(v.dtype).tiny)).squeeze(-1)
    if not shape.requires_grad:
        return x
    slope: Tensor = torch._standard_gamma_grad(a, x)
    return x + slope * (shape - shape.detach())
