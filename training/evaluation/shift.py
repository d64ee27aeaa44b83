"""Shifted pictures: grey ones rotated, colour ones corrupted at five severities.

The families are those of [Hendrycks19]. The code, the strengths and the textures are ours, so scores are not comparable
with those on the published CIFAR-10-C.
"""

import math
from collections.abc import Callable
from io import BytesIO
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dubito.models.images import LUMINANCE
from dubito.training.data.data import DataError

ANGLES: Final = tuple(float(degrees) for degrees in range(15, 181, 15))
SEVERITIES: Final = (1.0, 2.0, 3.0, 4.0, 5.0)
ICE: Final = (0.80, 0.88, 0.96)  # the colour of frost: red, green, blue
AT_ONCE: Final = 2**21  # values in memory as floats at a time


def families(channels: int) -> dict[str, tuple[float, ...]]:
    """Families for pictures with this number of channels, and their severities: degrees for rotation, else 1 … 5."""
    if channels == 1:
        return {"rotation": ANGLES}
    if channels == 3:
        return dict.fromkeys(CORRUPTIONS, SEVERITIES)
    raise DataError(f"pictures have {channels} channels; shifts are known for 1 (grey) and 3 (red, green, blue).")


def corrupt(x: Tensor, family: str, severity: float, seed: int = 0) -> Tensor:
    """Corrupted pictures, (N, C, H, W) uint8 in and out. The same x and seed give the same pictures on any device; the
    noise of a picture depends on its place in x, so pass a whole set, not batch by batch."""
    if x.dtype != torch.uint8 or x.dim() != 4 or 0 in x.shape:
        raise DataError(f"pictures came as {x.dtype} of shape {tuple(x.shape)}; expected uint8 (N, C, H, W).")
    known = families(x.shape[1])
    if family not in known:
        raise DataError(f"no shift {family!r} for pictures of {x.shape[1]} channels; there are: {', '.join(known)}.")
    if severity not in known[family]:
        expected = ", ".join(f"{s:g}" for s in known[family])
        raise DataError(f"{family} has no severity {severity:g}; expected one of {expected}.")
    if family == "rotation":
        return _rotate(x, severity)
    apply, strengths = CORRUPTIONS[family]
    strength = strengths[SEVERITIES.index(severity)]
    rng = torch.Generator().manual_seed(seed)
    parts = x.cpu().split(max(1, AT_ONCE // x[0].numel()))
    return torch.cat([_to_bytes(apply(part / 255, strength, rng)) for part in parts]).to(x.device)


def _rotate(x: Tensor, degrees: float) -> Tensor:
    """Rotate anticlockwise about the centre with bilinear interpolation; uncovered corners are black.

    The same as torchvision's `rotate`, whose import would take longer than the rotation.
    """
    (N, _, H, W), angle = x.shape, math.radians(degrees)
    down, right = (torch.arange(n, device=x.device) - (n - 1) / 2 for n in (H, W))  # pixels from the centre
    from_right = right * math.cos(angle) - down[:, None] * math.sin(angle)  # (H, W)  where each pixel comes from
    from_down = right * math.sin(angle) + down[:, None] * math.cos(angle)
    source = torch.stack([from_right / (W / 2), from_down / (H / 2)], -1).expand(N, H, W, 2)
    return F.grid_sample(x.float(), source, align_corners=False).round().to(torch.uint8)


def _to_bytes(x: Tensor) -> Tensor:
    return (x * 255).round().clamp(0, 255).to(torch.uint8)


# Below, x is (N, 3, H, W) float32 in [0, 1]; results are clamped to that range afterwards. Strengths are tuned for
# 32 × 32 pictures. In larger ones lengths grow with the side, so that a blur hides the same share of the object; noise
# and the number of cells grow with its square root, because neighbouring pixels are more alike.


def _scale(x: Tensor) -> float:
    return min(x.shape[-2:]) / 32


def _gaussian_noise(x: Tensor, sigma: float, rng: torch.Generator) -> Tensor:
    return x + sigma * math.sqrt(_scale(x)) * torch.randn(x.shape, generator=rng)


def _shot_noise(x: Tensor, photons: float, rng: torch.Generator) -> Tensor:
    """Poisson noise: each value is a count of photons, with a mean of `photons` for white."""
    photons /= _scale(x)
    return torch.poisson(x * photons, generator=rng) / photons


def _impulse_noise(x: Tensor, share: float, rng: torch.Generator) -> Tensor:
    """Sets a share of the values to 0 or 1 with equal probability."""
    share = min(share * math.sqrt(_scale(x)), 0.5)
    u = torch.rand(x.shape, generator=rng)
    return torch.where(u < share, (u < share / 2).float(), x)


def _defocus_blur(x: Tensor, radius: float, rng: torch.Generator) -> Tensor:
    """The mean over a disc with an edge smoothed over one pixel."""
    radius *= _scale(x)
    dy, dx = _offsets(radius)
    return _convolve(x, (radius + 0.5 - (dx**2 + dy**2).sqrt()).clamp(0, 1)[None])


def _glass_blur(x: Tensor, reach: float, rng: torch.Generator) -> Tensor:
    """Each pixel comes from a random place at most `reach` away along each axis, softened before and after."""
    (N, _, H, W), sigma = x.shape, 0.4 * math.sqrt(_scale(x))
    dy, dx = (reach * _scale(x) * (2 * torch.rand(2, N, H, W, generator=rng) - 1)).round().long()
    rows = (torch.arange(H)[:, None] + dy).clamp(0, H - 1)
    columns = (torch.arange(W) + dx).clamp(0, W - 1)
    source = (rows * W + columns).reshape(N, 1, H * W).expand(-1, 3, -1)
    return _soften(_soften(x, sigma).flatten(2).gather(2, source).reshape(x.shape), sigma)


def _motion_blur(x: Tensor, length: float, rng: torch.Generator) -> Tensor:
    angle = math.pi * torch.rand(len(x), generator=rng)
    return _convolve(x, _lines(length * _scale(x), angle))


def _zoom_blur(x: Tensor, most: float, rng: torch.Generator) -> Tensor:
    """The mean of the picture enlarged by 1 … 1 + most, in steps that move the border by one pixel at most."""
    H, W = x.shape[-2:]
    steps = math.ceil(most * max(H, W) / 2) + 1
    down, right = (torch.arange(n) - (n - 1) / 2 for n in (H, W))  # pixels from the centre
    total = torch.zeros_like(x)
    for zoom in torch.linspace(1, 1 + most, steps).tolist():
        nearer = 1 / zoom - 1
        total += _displaced(x, (nearer * down)[:, None].expand(1, H, W), (nearer * right).expand(1, H, W))
    return total / steps


def _snow(x: Tensor, amount: float, rng: torch.Generator) -> Tensor:
    """Slanting flakes in front of a scene that is made grey and bright."""
    (N, _, H, W), scale = x.shape, _scale(x)
    u = torch.rand(N, 1, max(1, round(H / scale)), max(1, round(W / scale)), generator=rng)
    angle = math.pi * (0.25 + 0.5 * torch.rand(N, generator=rng))  # within 45° of the vertical
    share, length = 0.09 * amount, 1 + amount
    flakes = F.interpolate((1 - u / share).clamp(min=0).sqrt(), (H, W), mode="bilinear")
    flakes = (length * _convolve(flakes, _lines(length * scale, angle))).clamp(max=0.95)
    x = x.lerp(0.35 + 0.65 * _grey(x), 0.4 * amount)
    return x + (1 - x) * flakes


def _frost(x: Tensor, amount: float, rng: torch.Generator) -> Tensor:
    """Ice from the border inwards, with bright veins where a random field crosses zero."""
    N, _, H, W = x.shape
    veins = (-2.5 * _clouds(N, H, W, 1.8, rng).abs()).exp()
    down, right = torch.linspace(-1, 1, H)[:, None], torch.linspace(-1, 1, W)
    border = (down**2 + right**2) / 2  # 0 in the centre, 1 in the corners
    cover = torch.sigmoid(2 * (_clouds(N, H, W, 1.8, rng) + 3 * border + 2 * amount - 2.5))  # 0 … 1
    ice = torch.tensor(ICE)[:, None, None] * (0.6 + 0.4 * veins)
    return x + amount * cover * (0.7 + 0.3 * veins) * (ice - x)


def _fog(x: Tensor, amount: float, rng: torch.Generator) -> Tensor:
    N, _, H, W = x.shape
    thickness = amount * (1 + 0.25 * _clouds(N, H, W, 1.8, rng))
    return x.lerp(torch.tensor(0.85), thickness.clamp(0, 0.95))


def _brightness(x: Tensor, more: float, rng: torch.Generator) -> Tensor:
    """Raises the value (of hue, saturation, value) by `more`; black becomes grey."""
    value = x.amax(1, keepdim=True)
    raised = (value + more).clamp(max=1)
    return torch.where(value > 0, x * (raised / value.clamp(min=1e-6)), raised)


def _contrast(x: Tensor, kept: float, rng: torch.Generator) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    return mean + kept * (x - mean)


def _elastic(x: Tensor, spread: float, rng: torch.Generator) -> Tensor:
    """Smooth displacement: normal steps of standard deviation `spread` at 5 × 5 knots, cubic interpolation between."""
    N, _, H, W = x.shape
    knots = torch.randn(N, 2, 5, 5, generator=rng)
    steps = F.interpolate(spread * _scale(x) * knots, (H, W), mode="bicubic", align_corners=True)
    return _displaced(x, steps[:, 0], steps[:, 1])


def _pixelate(x: Tensor, cells: float, rng: torch.Generator) -> Tensor:
    """Each pixel becomes the mean of its cell, with `cells` of them along the shorter side."""
    H, W = x.shape[-2:]
    share = min(cells * math.sqrt(_scale(x)) / min(H, W), 1)
    rows, columns = (_cell_means(n, max(1, round(share * n))) for n in (H, W))
    return rows @ x @ columns


def _cell_means(n: int, cells: int) -> Tensor:
    """The symmetric matrix (n, n) that replaces each value by the mean of its cell."""
    cell = torch.arange(n) * cells // n
    same = (cell[:, None] == cell).float()
    return same / same.sum(0)


def _jpeg(x: Tensor, quality: float, rng: torch.Generator) -> Tensor:
    decoded = torch.empty(len(x), *x.shape[2:], 3, dtype=torch.uint8)
    for picture, out in zip(_to_bytes(x).permute(0, 2, 3, 1).contiguous(), decoded, strict=True):
        file = BytesIO()
        Image.fromarray(picture.numpy()).save(file, "jpeg", quality=int(quality))
        out.copy_(torch.from_numpy(np.array(Image.open(file))))
    return decoded.permute(0, 3, 1, 2) / 255


Corruption = Callable[[Tensor, float, torch.Generator], Tensor]
CORRUPTIONS: Final[dict[str, tuple[Corruption, tuple[float, float, float, float, float]]]] = {
    "gaussian_noise": (_gaussian_noise, (0.04, 0.055, 0.075, 0.10, 0.14)),  # deviation
    "shot_noise": (_shot_noise, (400, 200, 100, 60, 35)),  # photons on white
    "impulse_noise": (_impulse_noise, (0.01, 0.025, 0.05, 0.08, 0.12)),  # share of values
    "defocus_blur": (_defocus_blur, (0.6, 0.9, 1.2, 1.6, 2.1)),  # pixels
    "glass_blur": (_glass_blur, (0.6, 0.8, 1.0, 1.3, 1.7)),  # pixels
    "motion_blur": (_motion_blur, (2.5, 3.5, 5.0, 6.5, 8.5)),  # pixels
    "zoom_blur": (_zoom_blur, (0.08, 0.13, 0.2, 0.28, 0.38)),  # largest zoom, less 1
    "snow": (_snow, (0.2, 0.4, 0.6, 0.8, 1.0)),
    "frost": (_frost, (0.35, 0.5, 0.65, 0.8, 0.95)),
    "fog": (_fog, (0.2, 0.32, 0.44, 0.56, 0.68)),  # share of fog
    "brightness": (_brightness, (0.07, 0.13, 0.19, 0.26, 0.34)),  # more value
    "contrast": (_contrast, (0.7, 0.5, 0.37, 0.26, 0.17)),  # share of contrast kept
    "elastic": (_elastic, (0.6, 0.9, 1.2, 1.6, 2.1)),  # pixels
    "pixelate": (_pixelate, (26, 20, 16, 13, 10)),  # cells a side
    "jpeg": (_jpeg, (75, 55, 40, 28, 18)),  # quality
}


def _offsets(reach: float) -> tuple[Tensor, Tensor]:
    """Rows (k, 1) and columns (k,) of a kernel that covers `reach` pixels each way."""
    n = math.ceil(reach)
    steps = torch.arange(-n, n + 1.0)
    return steps[:, None], steps


def _lines(length: float, angle: Tensor) -> Tensor:
    """Kernels (N, k, k) of a line through the centre for each angle (N,), its points spread bilinearly over pixels."""
    count = math.ceil(4 * length)
    along = length * ((torch.arange(count) + 0.5) / count - 0.5)  # from -length/2 to length/2
    dy, dx = _offsets(length / 2)
    rows, columns = (
        (1 - (d.flatten() - along[:, None] * slope[:, None, None]).abs()).clamp(min=0)  # (N, count, k)
        for d, slope in ((dy, angle.sin()), (dx, angle.cos()))
    )
    return rows.mT @ columns


def _soften(x: Tensor, sigma: float) -> Tensor:
    dy, dx = _offsets(3 * sigma)
    return _convolve(x, (-(dx**2 + dy**2) / (2 * sigma**2)).exp()[None])


def _convolve(x: Tensor, kernels: Tensor) -> Tensor:
    """Convolve each picture with its kernel (N or 1, k, k), k odd, scaled to sum 1; borders are replicated."""
    k = kernels.shape[-1]
    padded = F.pad(x, (k // 2,) * 4, mode="replicate")
    size = padded.shape[-2:]
    kernels = kernels / kernels.sum((-2, -1), keepdim=True)
    spectrum = torch.fft.rfft2(padded) * torch.fft.rfft2(kernels[:, None], s=size)
    blurred: Tensor = torch.fft.irfft2(spectrum, s=size)
    return blurred[..., k - 1 :, k - 1 :]  # without the wrapped-around border


def _displaced(x: Tensor, dy: Tensor, dx: Tensor) -> Tensor:
    """Take each pixel from (dy, dx) pixels further on, (N or 1, H, W) each; borders are replicated."""
    N, _, H, W = x.shape
    rows = 2 * (torch.arange(H)[:, None] + dy + 0.5) / H - 1  # -1 … 1 from edge to edge
    columns = 2 * (torch.arange(W) + dx + 0.5) / W - 1
    grid = torch.stack([columns, rows], -1).expand(N, -1, -1, -1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _clouds(N: int, H: int, W: int, slope: float, rng: torch.Generator) -> Tensor:
    """Random fields whose amplitude falls with frequency to the power of `slope`: (N, 1, H, W), mean 0, deviation 1."""
    frequency = (torch.fft.fftfreq(H)[:, None] ** 2 + torch.fft.rfftfreq(W) ** 2).sqrt()
    frequency[0, 0] = math.inf
    white = torch.fft.rfft2(torch.randn(N, 1, H, W, generator=rng))
    field: Tensor = torch.fft.irfft2(white * frequency**-slope, s=(H, W))
    return field / field.std((2, 3), correction=0, keepdim=True).clamp(min=1e-6)  # a single pixel has deviation 0


def _grey(x: Tensor) -> Tensor:
    return (x * torch.tensor(LUMINANCE)[:, None, None]).sum(1, keepdim=True)
