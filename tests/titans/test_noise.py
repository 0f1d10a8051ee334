"""Noise in the shape of images, and the options that scripts share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from titans.dataloader.noise import NoiseImages
from titans.utils.scripts import add_synthetic, image_parser


def test_noise_has_the_shape_of_images_and_is_the_same_in_every_pass() -> None:
    data = NoiseImages(4, 8, 3, steps=2)
    first, second = list(data), list(data)
    assert len(data) == len(first) == 2
    assert [images.shape for images, _ in first] == [(4, 3, 8, 8)] * 2
    assert all(0 <= label < 3 for _, labels in first for label in labels.tolist())
    assert all(
        torch.equal(a, b)
        for one, two in zip(first, second, strict=True)
        for a, b in zip(one, two, strict=True)
    )
    other = next(iter(NoiseImages(4, 8, 3, seed=1)))
    assert not torch.equal(other[0], first[0][0])


def test_scripts_share_their_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DATA", raising=False)
    parser = image_parser("as it\n   is written", tmp_path / "config.py", "the plan")
    add_synthetic(parser)
    args = parser.parse_args(["-s"])
    assert (args.config, args.data, args.synthetic) == (tmp_path / "config.py", "data", True)
    assert "as it\n   is written" in parser.format_help()
    assert "config" not in image_parser(None).parse_args([])
    monkeypatch.setenv("DATA", "elsewhere")
    assert image_parser(None).parse_args([]).data == "elsewhere"


def test_a_config_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        image_parser(None, Path("config.py")).parse_args(["--config", "nowhere.py"])
    assert "there is no file nowhere.py; the folders of examples/ have configs" in capsys.readouterr().err
