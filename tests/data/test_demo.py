"""The demo set is the same for a seed, complete or absent, and says in words what it shows."""

import hashlib
import threading
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import yaml

from data.config import DataConfig, SourceConfig
from data.demo import CLIPS, WORDS, make_demo
from data.geometry import unpatchify
from data.loader import Loader
from data.manifest import open_manifest


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "digits"
    make_demo(folder)
    return folder


def settings(folder: Path) -> DataConfig:
    text = (Path(__file__).parents[2] / "conf" / "data" / "digits.yaml").read_text()
    values = yaml.safe_load(text.replace("datasets/digits", str(folder)))
    sources = {name: SourceConfig(**source) for name, source in values.pop("sources").items()}
    return DataConfig(sources=sources, **(values | {"workers": 0}))


def test_the_set_is_byte_identical_for_a_seed(demo: Path, tmp_path: Path) -> None:
    def prints(folder: Path, seed: int) -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in make_demo(folder, seed)}

    first = prints(demo, 0)
    assert len(first) == 6 and prints(tmp_path / "b", 0) == first and prints(tmp_path / "c", 1) != first
    assert sum(path.stat().st_size for path in make_demo(demo)) < 6e6


def test_makers_may_race_and_a_half_made_set_is_never_seen(tmp_path: Path) -> None:
    threads = [threading.Thread(target=make_demo, args=(tmp_path / "d",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert not (tmp_path / "d").exists() or len(list((tmp_path / "d").glob("*.tar"))) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_its_configuration_gives_whole_batches_of_pictures_and_clips(demo: Path) -> None:
    config = settings(demo)
    manifest = open_manifest(config)
    assert manifest.samples == 1797 + CLIPS and not manifest.reports
    samples = [
        s
        for batch in islice(Loader(config, manifest, batch_tokens=8192, rank=0, ranks=1, seed=0), 4)
        for s in batch.samples
    ]
    pictures = [sample for sample in samples if sample.source == "pictures"]
    clips = [sample for sample in samples if sample.source == "clips"]
    assert {bytes(sample.text_W).decode() for sample in pictures} == {f"a {word}" for word in WORDS}
    assert all(48 <= len(sample.patch_VC) <= 64 for sample in pictures)
    assert len({sample.grid for sample in pictures}) > 3
    assert clips and all(sample.grid[0] == 4 and b"moving" in bytes(sample.text_W) for sample in clips)
    for sample in clips:
        frames_FHW3 = unpatchify(sample.patch_VC, sample.grid, 2, 1).astype(float)
        assert np.abs(frames_FHW3[0] - frames_FHW3[-1]).mean() > 2


def test_a_classifier_of_the_scans_reads_the_pictures(demo: Path) -> None:
    from PIL import Image
    from sklearn.datasets import load_digits
    from sklearn.svm import SVC

    digits = load_digits()
    judge = SVC(gamma=0.001).fit(digits.data, digits.target)
    config = settings(demo)
    config.sources = {"pictures": config.sources["pictures"]}
    batch = next(iter(Loader(config, open_manifest(config), batch_tokens=20_000, rank=0, ranks=1, seed=0)))
    right = 0
    for sample in batch.samples:
        gray = Image.fromarray(unpatchify(sample.patch_VC, sample.grid, 2, 1)[0]).convert("L")
        small = np.asarray(gray.resize((8, 8), Image.Resampling.BOX), float) * (16 / 255)
        right += WORDS[judge.predict(small.reshape(1, -1))[0]] == bytes(sample.text_W).decode().removeprefix(
            "a "
        )
    assert right / len(batch.samples) > 0.97
