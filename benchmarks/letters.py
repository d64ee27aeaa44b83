"""Pictures of letters as context inputs for function-space VI on Fashion-MNIST: white on black, no digit among them.

    python -m benchmarks.letters --out letters.npz
    python -m benchmarks.function_space_pictures --data-root DIR --keep FOLDER --sets fashion-mnist --methods ffg-w \\
        --set context.inputs=npz:letters.npz

28 × 28 pixels, in the fonts that matplotlib ships, turned by up to 30 degrees, of several sizes and shades.
"""

import argparse
import string
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

SIDE, FINER = 28, 3  # pixels of a picture, and by how many more it is drawn


def letters(n: int, seed: int) -> NDArray[np.uint8]:
    """(n, 1, 28, 28)"""
    rng = np.random.default_rng(seed)
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = sorted(path for path in folder.glob("DejaVu*.ttf") if "Display" not in path.name)  # which has few letters
    wide = SIDE * FINER
    out = np.zeros((n, 1, SIDE, SIDE), np.uint8)
    for one in out:
        picture = Image.new("L", (wide, wide))
        letter = string.ascii_letters[rng.integers(len(string.ascii_letters))]
        font = ImageFont.truetype(str(fonts[rng.integers(len(fonts))]), int(rng.integers(45, 75)))
        shade = int(rng.integers(150, 256))
        ImageDraw.Draw(picture).text((wide // 2, wide // 2), letter, fill=shade, font=font, anchor="mm")
        turned = picture.rotate(rng.uniform(-30, 30), Image.Resampling.BILINEAR)
        one[0] = np.asarray(turned.resize((SIDE, SIDE), Image.Resampling.BOX))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="an .npz file with x, and y of zeros")
    parser.add_argument("--pictures", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    np.savez(args.out, x=letters(args.pictures, args.seed), y=np.zeros(args.pictures, np.int64))


if __name__ == "__main__":
    main()
