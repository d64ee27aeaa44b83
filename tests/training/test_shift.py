"""Each corruption does what its name says, as strongly as it states, and nothing depends on hidden state."""

import colorsys
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import fft, ndimage, stats
from torch import Tensor

from dubito.training.data.data import DataError
from dubito.training.evaluation.shift import AT_ONCE, corrupt, families

COLOUR = tuple(families(3))
FIXED = {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg"}  # the same for every seed


def pictures(n: int, height: int = 32, width: int = 32) -> Tensor:
    """Like nature: amplitudes that fall as 1/frequency, channels that resemble each other, a disc with a sharp edge."""
    rng = np.random.default_rng(0)
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)
    f = np.sqrt(rows**2 + columns**2) + 1 / max(height, width)
    common, own = (np.fft.ifft2(np.fft.fft2(rng.normal(size=(n, c, height, width))) / f).real for c in (1, 3))
    x = common / common.std() + 0.4 * own / own.std()
    y_, x_ = np.mgrid[:height, :width]
    disc = (y_ - height / 2) ** 2 + (x_ - width / 3) ** 2 < (min(height, width) / 4) ** 2
    x = x + 1.5 * disc * rng.normal(size=(n, 3, 1, 1))
    return torch.from_numpy((120 + 45 * x).clip(0, 255).astype(np.uint8))


def flat(value: int, n: int = 4, size: int = 32) -> Tensor:
    return torch.full((n, 3, size, size), value, dtype=torch.uint8)


def ramp(slope: int, n: int, size: int) -> Tensor:
    """Values that rise to the right."""
    return (slope * torch.arange(size)).to(torch.uint8).expand(n, 3, size, size)


def step(n: int, size: int) -> Tensor:
    """Black on the left, white on the right."""
    return torch.where(torch.arange(size) < size // 2, 0, 255).to(torch.uint8).expand(n, 3, size, size)


def edge_variance(profile: Tensor) -> Tensor:
    """How far a blur spreads a step: the variance of the density whose distribution function is (…, W) / 255."""
    density = profile.double().diff(dim=-1) / 255
    place = torch.arange(density.shape[-1]).double()
    mean = (density * place).sum(-1, keepdim=True)
    return (density * (place - mean) ** 2).sum(-1)


def error(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).square().mean().sqrt())


def test_families_and_their_severities() -> None:
    assert families(1) == {"rotation": tuple(range(15, 181, 15))}
    assert len(COLOUR) == 15
    assert all(severities == (1, 2, 3, 4, 5) for severities in families(3).values())


def test_what_is_unknown_is_said() -> None:
    x, grey = flat(0), flat(0)[:, :1]
    with pytest.raises(DataError, match=r"2 channels; shifts are known for 1 .* and 3"):
        families(2)
    with pytest.raises(
        DataError, match=r"no shift 'rain' for pictures of 3 channels; there are: gaussian_noise, .*jpeg"
    ):
        corrupt(x, "rain", 1)
    with pytest.raises(DataError, match=r"no shift 'fog' for pictures of 1 channels; there are: rotation\."):
        corrupt(grey, "fog", 1)
    with pytest.raises(DataError, match=r"fog has no severity 2\.5; expected one of 1, 2, 3, 4, 5\."):
        corrupt(x, "fog", 2.5)
    with pytest.raises(DataError, match=r"rotation has no severity 10; expected one of 15, 30, .*180\."):
        corrupt(grey, "rotation", 10)
    with pytest.raises(DataError, match=r"torch\.float32 of shape \(4, 3, 32, 32\); expected uint8 \(N, C, H, W\)"):
        corrupt(x.float(), "fog", 1)
    with pytest.raises(DataError, match=r"shape \(3, 32, 32\)"):
        corrupt(x[0], "fog", 1)


@pytest.mark.parametrize("family", [*COLOUR, "rotation"])
def test_form_input_and_generators_are_kept(family: str) -> None:
    x = pictures(6)
    if family == "rotation":
        x = x[:, :1]
    severity = families(x.shape[1])[family][2]
    before, state = x.clone(), torch.get_rng_state()
    y = corrupt(x, family, severity, seed=3)
    assert y.dtype == torch.uint8
    assert y.shape == x.shape
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    assert torch.equal(corrupt(x, family, severity, seed=3), y)
    assert torch.equal(corrupt(x, family, severity, seed=4), y) == (family in FIXED | {"rotation"})


@pytest.mark.parametrize("family", COLOUR)
def test_each_severity_changes_pictures_more_than_the_one_before(family: str) -> None:
    x = pictures(96)
    errors = [error(corrupt(x, family, s), x) for s in families(3)[family]]
    assert 1 < errors[0] < 0.6 * errors[4]  # in grey levels: mild is not nothing
    assert all(a < b for a, b in pairwise(errors))


@pytest.mark.parametrize("family", COLOUR)
@pytest.mark.parametrize("shape", [(8, 8), (5, 40), (70, 45), (1, 1)])
def test_any_size_will_do(family: str, shape: tuple[int, int]) -> None:
    x = pictures(2, *shape)
    assert corrupt(x, family, 5).shape == x.shape


@pytest.mark.parametrize("family", sorted(set(COLOUR) - FIXED))
def test_each_picture_has_its_own_randomness(family: str) -> None:
    """Also when the pictures are too many to be in memory as floats at once."""
    n = AT_ONCE // (3 * 32 * 32)
    y = corrupt(pictures(1).expand(n + 6, -1, -1, -1), family, 5)
    some = torch.cat([y[:6], y[n:]])
    assert len(torch.unique(some.flatten(1), dim=0)) == 12


@pytest.mark.parametrize(("severity", "sigma"), [(1, 0.04), (2, 0.055), (3, 0.075), (4, 0.10), (5, 0.14)])
def test_gaussian_noise_has_its_variance(severity: int, sigma: float) -> None:
    y = corrupt(flat(128, 64), "gaussian_noise", severity).double()
    v, n = (255 * sigma) ** 2 + 1 / 12, y.numel()  # 1/12: rounding
    assert abs(float(y.mean()) - 128) < 5 * math.sqrt(v / n)
    assert abs(float(y.var()) - v) < 5 * v * math.sqrt(2 / n)
    assert abs(float((y[:, 0] - 128).mul(y[:, 1] - 128).mean())) < 5 * v / math.sqrt(n / 3)  # channels apart


@pytest.mark.parametrize(("severity", "photons"), [(1, 400), (2, 200), (3, 100), (4, 60), (5, 35)])
@pytest.mark.parametrize("level", [51, 128])
def test_shot_noise_counts_photons(severity: int, photons: int, level: int) -> None:
    assert_counts(corrupt(flat(level, 64), "shot_noise", severity), level, photons)


def assert_counts(y: Tensor, level: int, photons: float) -> None:
    """Mean and variance against the sum over all counts, in grey levels as they come out: rounded and cut off."""
    counts = np.arange(2000)
    p = stats.poisson.pmf(counts, level / 255 * photons)
    values = np.round(counts * 255 / photons).clip(0, 255)
    mean = (p * values).sum()
    second, fourth = ((p * (values - mean) ** k).sum() for k in (2, 4))
    assert abs(float(y.double().mean()) - mean) < 5 * math.sqrt(second / y.numel())
    assert abs(float(y.double().var()) - second) < 5 * math.sqrt((fourth - second**2) / y.numel())


@pytest.mark.parametrize(("severity", "share"), [(1, 0.01), (2, 0.025), (3, 0.05), (4, 0.08), (5, 0.12)])
def test_impulse_noise_has_its_share(severity: int, share: float) -> None:
    y = corrupt(flat(128, 64), "impulse_noise", severity)
    n = y.numel()
    for value, expected in ((0, share / 2), (255, share / 2), (128, 1 - share)):
        found = float((y == value).double().mean())
        assert abs(found - expected) < 5 * math.sqrt(expected * (1 - expected) / n)


def test_larger_pictures_get_more_noise() -> None:
    """By the square root of the side: four times the side, twice the deviation."""
    y = corrupt(flat(128, 8, 128), "gaussian_noise", 2).double()
    v, n = (255 * 2 * 0.055) ** 2 + 1 / 12, y.numel()
    assert abs(float(y.var()) - v) < 5 * v * math.sqrt(2 / n)
    assert_counts(corrupt(flat(51, 8, 128), "shot_noise", 2), 51, 200 / 4)
    share = float((corrupt(flat(128, 8, 128), "impulse_noise", 2) != 128).double().mean())
    assert abs(share - 0.05) < 5 * math.sqrt(0.05 * 0.95 / n)


@pytest.mark.parametrize("size", [8, 9, 28, 64])
def test_quarter_turns_are_exact(size: int) -> None:
    x = pictures(5, size, size)[:, :1]
    assert torch.equal(corrupt(x, "rotation", 90), torch.rot90(x, 1, (2, 3)))
    assert torch.equal(corrupt(x, "rotation", 180), torch.rot90(x, 2, (2, 3)))


@pytest.mark.parametrize("degrees", families(1)["rotation"])
def test_rotation_is_torchvisions(degrees: float) -> None:
    """But for values half-way between two integers, which may be rounded the other way."""
    from torchvision.transforms.v2 import functional

    x = torch.randint(256, (20, 1, 28, 21), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = functional.rotate(x, degrees, interpolation=functional.InterpolationMode.BILINEAR)
    apart = (corrupt(x, "rotation", degrees).int() - expected.int()).abs()
    assert int(apart.max()) <= 1
    assert float(apart.double().mean()) < 0.005


@pytest.mark.parametrize("degrees", families(1)["rotation"])
def test_rotation_turns_the_centre_of_mass(degrees: float) -> None:
    x = torch.zeros(1, 1, 41, 41, dtype=torch.uint8)
    x[..., 18:23, 28:33] = 200  # centred 10 to the right of the middle
    y = corrupt(x, "rotation", degrees)[0, 0].double()
    place = torch.arange(41).double() - 20
    right, up = float((y.sum(0) * place).sum() / y.sum()), -float((y.sum(1) * place).sum() / y.sum())
    angle = math.radians(degrees)
    assert (right, up) == pytest.approx((10 * math.cos(angle), 10 * math.sin(angle)), abs=0.05)
    assert float(y.sum()) == pytest.approx(25 * 200, rel=0.02)


@pytest.mark.parametrize(
    "family",
    ["defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "contrast", "elastic", "pixelate"],
)
@pytest.mark.parametrize("value", [0, 100, 255])
def test_nothing_to_blur_stays_as_it_is(family: str, value: int) -> None:
    x = flat(value)
    assert torch.equal(corrupt(x, family, 5), x)


def test_defocus_spreads_an_edge_like_a_disc() -> None:
    """The variance of a disc of radius r along an axis is r²/4; ten times the side has ten times the radius."""
    spread = edge_variance(corrupt(step(1, 320), "defocus_blur", 3)[0, 0, 160])
    assert float(spread) == pytest.approx(12**2 / 4, rel=0.02)


def test_motion_spreads_an_edge_like_a_line() -> None:
    """Along and across together, whatever the angle: a line of length L has variance L²/12."""
    x = step(16, 320)
    along = edge_variance(corrupt(x, "motion_blur", 3)[:, 0, 160])
    across = edge_variance(corrupt(x.mT, "motion_blur", 3)[:, 0, :, 160])
    torch.testing.assert_close(along + across, torch.full((16,), 50**2 / 12).double(), rtol=0.02, atol=0)
    assert along.std() > 30  # the angles differ


@pytest.mark.parametrize("family", ["defocus_blur", "motion_blur"])
def test_blurs_are_convolutions_with_the_border_repeated(family: str) -> None:
    """The kernel is read off a white point, each value to 1/255; scipy then convolves another picture with it."""
    point = torch.zeros(1, 3, 33, 33, dtype=torch.uint8)
    point[..., 16, 16] = 255
    kernel = corrupt(point, family, 4)[0, 0, 9:24, 9:24].double().numpy()
    kernel /= kernel.sum()
    x = pictures(1, 33, 33)
    expected = ndimage.convolve(x[0].double().numpy(), kernel[None], mode="nearest")
    got = corrupt(x, family, 4)[0].double().numpy()
    assert np.abs(got - expected).mean() < 0.7
    assert np.abs(got - expected).max() < 4
    assert np.abs(got - x[0].double().numpy()).mean() > 5


def test_glass_shuffles_only_nearby() -> None:
    x = step(8, 32)
    y = corrupt(x, "glass_blur", 5)
    assert torch.equal(y[..., :10], x[..., :10])  # 2 pixels of shuffling and twice 2 of softening
    assert torch.equal(y[..., 22:], x[..., 22:])
    near = y[:, 0, :, 13:19].double()
    assert near.std(1).mean() > 30  # rows differ, which no blur does
    assert abs(float(near.mean()) - 127.5) < 5 * 127.5 / math.sqrt(8 * 32)


@pytest.mark.parametrize(("severity", "most"), [(1, 0.08), (3, 0.2), (5, 0.38)])
def test_zoom_flattens_a_slope(severity: int, most: float) -> None:
    """A zoom of z divides slopes by z, and the mean of 1/z over 1 … 1 + most is log(1 + most) / most."""
    x = ramp(7, 1, 33)
    y = corrupt(x, "zoom_blur", severity)[0, 0, 16].double()
    assert float(y[16]) == 7 * 16  # the centre stays
    assert float(y[30] - y[2]) / (7 * 28) == pytest.approx(math.log1p(most) / most, abs=0.008)
    assert torch.equal(corrupt(x.mT, "zoom_blur", severity), corrupt(x, "zoom_blur", severity).mT)


def test_elastic_moves_by_its_spread() -> None:
    """On a slope a move shows as a change of value; the centre of 33 × 33 pixels is a knot."""
    n = 2000
    x = ramp(7, n, 33)
    for turned in (False, True):
        y = corrupt(x.mT if turned else x, "elastic", 3)[:, 0, 16, 16].double() - 7 * 16
        v = (7 * 1.2 * 33 / 32) ** 2 + 1 / 12
        assert abs(float(y.mean())) < 5 * math.sqrt(v / n)
        assert abs(float(y.var()) - v) < 5 * v * math.sqrt(2 / n)


def test_brightness_raises_the_value_alone() -> None:
    x = pictures(1, 8, 8)
    x[..., 0, 0] = 0  # black has no hue, and becomes grey
    y = corrupt(x, "brightness", 3)
    for before, after in zip(x[0].flatten(1).T.tolist(), y[0].flatten(1).T.tolist(), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(v / 255 for v in before))
        expected = [255 * v for v in colorsys.hsv_to_rgb(hue, saturation, min(1, value + 0.19))]
        assert after == pytest.approx(expected, abs=0.51)
    assert y.double().mean() > x.double().mean() + 30


def test_contrast_keeps_the_mean_and_a_share_of_the_deviation() -> None:
    x = pictures(8)
    y = corrupt(x, "contrast", 5)
    before, after = (z.double().flatten(2) for z in (x, y))
    torch.testing.assert_close(after.mean(-1), before.mean(-1), rtol=0, atol=0.1)
    torch.testing.assert_close(after.std(-1), 0.17 * before.std(-1), rtol=0.02, atol=0)


@pytest.mark.parametrize("size", [32, 128])
def test_pixelate_gives_cells_their_mean(size: int) -> None:
    """Severity 3: 16 cells a side of 32 pixels, twice as many when there are four times the pixels."""
    block = size // (16 if size == 32 else 32)
    x = pictures(4, size, size)
    means = x.double().unfold(2, block, block).unfold(3, block, block).mean((-2, -1))
    expected = means.repeat_interleave(block, 2).repeat_interleave(block, 3)
    assert (corrupt(x, "pixelate", 3).double() - expected).abs().max() <= 0.5001


@pytest.mark.parametrize(("severity", "cells"), [(1, 26), (2, 20), (4, 13), (5, 10)])
def test_pixelate_has_its_number_of_cells(severity: int, cells: int) -> None:
    y = corrupt(ramp(8, 1, 32), "pixelate", severity)[0, 0]
    assert torch.equal(y, y[:1].expand(32, -1))
    assert len(y[0].unique()) == cells


def test_fog_is_as_thick_as_stated() -> None:
    """Clouds thicken and thin about the mean, 0.44 at severity 3, so black turns into 0.44 of the fog's 0.85."""
    y = corrupt(flat(0, 8), "fog", 3).double()
    torch.testing.assert_close(y.mean((1, 2, 3)), torch.full((8,), 255 * 0.44 * 0.85).double(), rtol=0, atol=0.5)
    assert (y.std((2, 3)) > 10).all()
    neighbours, far = ((y - y.roll(d, 3)).square().mean() for d in (1, 16))
    assert neighbours < 0.3 * far  # clouds are smooth


def test_frost_grows_from_the_border() -> None:
    y = corrupt(flat(40, 64), "frost", 3).double()
    corners = torch.cat([y[..., :4, :4], y[..., -4:, :4], y[..., :4, -4:], y[..., -4:, -4:]])
    assert corners.mean() > y[..., 12:20, 12:20].mean() + 30 > 70
    assert (y[:, 2].mean((1, 2)) > y[:, 0].mean((1, 2))).all()  # ice is bluish


def test_snow_is_white_flakes_on_a_greyer_scene() -> None:
    x = flat(0, 64)
    x[:, 0] = 120  # a red scene
    y = corrupt(x, "snow", 3).double()
    flakes = (y.amin(1) > 180).double().mean()
    assert 0.005 < flakes < 0.1
    ground = y.flatten(2).median(-1).values.mean(0)
    assert ground[0] - ground[1] < 100  # less saturated than the 120 it was
    assert ground[1] > 15


def test_jpeg_rounds_the_cosine_transform() -> None:
    """Of grey pictures, whose colour is nothing to lose: blocks of 8 × 8, in steps of the standard's example table
    (ITU-T T.81, table K.1), scaled by quality as the Independent JPEG Group does."""
    table = np.array(
        [
            [16, 11, 10, 16, 24, 40, 51, 61],
            [12, 12, 14, 19, 26, 58, 60, 55],
            [14, 13, 16, 24, 40, 57, 69, 56],
            [14, 17, 22, 29, 51, 87, 80, 62],
            [18, 22, 37, 56, 68, 109, 103, 77],
            [24, 35, 55, 64, 81, 104, 113, 92],
            [49, 64, 78, 87, 103, 121, 120, 101],
            [72, 92, 95, 98, 112, 100, 103, 99],
        ]
    )
    x = pictures(8)[:, :1].expand(-1, 3, -1, -1)
    blocks = x[:, 0].unfold(1, 8, 8).unfold(2, 8, 8).double().numpy() - 128  # (N, 4, 4, 8, 8)
    for severity, quality in zip(families(3)["jpeg"], (75, 55, 40, 28, 18), strict=True):
        percent = 5000 // quality if quality < 50 else 200 - 2 * quality
        steps = ((table * percent + 50) // 100).clip(1, 255)
        rounded = np.round(fft.dctn(blocks, axes=(3, 4), norm="ortho") / steps) * steps
        decoded = fft.idctn(rounded, axes=(3, 4), norm="ortho").swapaxes(2, 3).reshape(8, 1, 32, 32) + 128
        y = corrupt(x, "jpeg", severity)
        distance = (y - torch.from_numpy(decoded).clamp(0, 255)).abs().mean()
        assert distance < 1 < (y.double() - x).abs().mean() / 5  # integer cosines round a few coefficients otherwise
