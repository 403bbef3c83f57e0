"""Share of sampled digits that a judge reads as their prompt says: `python scripts/score_digits.py RUN`.

The judge is a support-vector classifier fitted on scikit-learn's 1,797 scanned 8x8 digits. The run's newest
checkpoint draws the ten digits at the size of its sampling.pictures; each is averaged down to 8x8 and judged.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.svm import SVC

from knapformer import choose_kernel
from knapformer_cli.sample import load_denoiser
from knapformer_cli.training.sampling import draw, whole_attention

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="run folder or checkpoint")
    parser.add_argument("--count", type=int, default=200, help="drawings, a multiple of ten")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config, model = load_denoiser(args.run, device)
    config.training.seed = args.seed
    labels = [number % 10 for number in range(args.count)]
    attend = whole_attention(choose_kernel("sdpa", device), device)
    prompts = [f"a {WORDS[label]}" for label in labels]
    size = (1, *config.sampling.pictures)
    drawn = draw(model, attend, prompts, range(args.count), size, config, device)

    digits = load_digits()
    judge = SVC(gamma=0.001).fit(digits.data, digits.target)
    read = judge.predict(np.stack([to_scan(frames[0]) for frames in drawn]))
    right = read == np.array(labels)
    for label, word in enumerate(WORDS):
        print(f"{word:>6} {right[label::10].mean():.2f}")
    print(f"score {right.mean():.3f} of {args.count} drawings")


def to_scan(picture: np.ndarray) -> np.ndarray:
    """[64] values of 0 to 16 like the scans', from a uint8 [H, W, 3] drawing of light ink on dark."""
    gray = Image.fromarray(picture).convert("L").resize((8, 8), Image.Resampling.BOX)
    return np.asarray(gray, float).ravel() * (16 / 255)


if __name__ == "__main__":
    main()
