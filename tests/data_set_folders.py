"""Small data set folders in the layouts in which the sets are distributed."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

SPLITS = ("train", "train", "train", "val", "test", "test")


def photo(path: Path, number: int, size: tuple[int, int] = (16, 16)) -> None:
    """Write a distinct image for each number, in the format of the file's ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    """Write a text file and create its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding=encoding)
    return path


def truncate(path: Path) -> None:
    """Cut a file in half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flickr(folder: Path, name: str = "flickr8k", splits: Sequence[str] = SPLITS) -> Path:
    """Karpathy's JSON and images; item i has 1 + i % 3 captions."""
    images = []
    for row, split in enumerate(splits):
        photo(folder / "images" / f"{row}.jpg", row, (16, 20))
        sentences = [{"raw": f"picture {row} as number {k} sees it", "tokens": []} for k in range(1 + row % 3)]
        images.append({"filename": f"{row}.jpg", "split": split, "sentences": sentences, "imgid": row, "sentids": []})
    write(folder / f"dataset_{name}.json", json.dumps({"dataset": name, "images": images}))
    return folder


def flickr8k_release(folder: Path, splits: Sequence[str] = SPLITS, text: str = "Flickr8k_text") -> Path:
    """The official release: captions and three lists in ``text``; one unlisted photo, and captions without a photo."""
    names = {"train": "trainImages", "val": "devImages", "test": "testImages"}
    lists: dict[str, list[str]] = {split: [] for split in names}
    lines = [f"2258277193_586949ec62.jpg.1#{number}\tA caption of no photo ." for number in range(5)]
    for row, split in enumerate([*splits, ""]):
        name = f"{100 + row}_{row:08x}.jpg"
        photo(folder / "Flicker8k_Dataset" / name, row, (16, 20))
        lines += [f"{name}#{number}\tPhoto {row} as number {number} sees it ." for number in range(5)]
        if split:
            lists[split].append(name)
    write(folder / text / "Flickr8k.token.txt", "\n".join(lines) + "\n")
    for split, own in lists.items():
        write(folder / text / f"Flickr_8k.{names[split]}.txt", "".join(f"{name}\n" for name in own))
    write(folder / text / "readme.txt", "not a list")
    return folder


def coco(folder: Path) -> Path:
    """Karpathy's JSON, two image folders, and instances with categories."""
    images = []
    for row, split in enumerate(("train", "restval", "val", "test", "test")):
        inner = "train2014" if split == "train" else "val2014"
        photo(folder / inner / f"COCO_{row}.jpg", row)
        said = [{"raw": f"scene {row}"}]
        images.append(
            {"filename": f"COCO_{row}.jpg", "filepath": inner, "split": split, "cocoid": 70 + row, "sentences": said}
        )
    write(folder / "dataset_coco.json", json.dumps({"images": images}))
    categories = [{"id": 18, "name": "dog"}, {"id": 1, "name": "person"}]
    for part, found in (("train2014", [(70, 18)]), ("val2014", [(71, 1), (71, 18), (73, 1)])):
        annotations = [{"image_id": image, "category_id": category} for image, category in found]
        content = {"annotations": annotations, "categories": categories}
        write(folder / "annotations" / f"instances_{part}.json", json.dumps(content))
    return folder


def iapr(folder: Path, n: int = 5) -> Path:
    """Images and annotations by folder, in the set's encoding, with an ampersand that is invalid XML."""
    for row in range(n):
        inner = f"{row // 3:02d}"
        photo(folder / "images" / inner / f"{row}.jpg", row)
        text = (
            f"<DOC>\n<DOCNO>annotations/{inner}/{row}.eng</DOCNO>\n<TITLE>Title {row}</TITLE>\n"
            f"<DESCRIPTION>{'' if row == 1 else f'a café & {row} trees;'}</DESCRIPTION>\n"
            f"<IMAGE>images/{inner}/{row}.jpg</IMAGE>\n</DOC>\n"
        )
        write(folder / "annotations_complete_eng" / inner / f"{row}.eng", text, "cp1252")
    write(folder / "saiapr_tc-12" / "00" / "labels.txt", "0 1 3\n0 2 7\n1 1 3\n")
    write(folder / "saiapr_tc-12" / "wlist.txt", "3 sky\n7 tree\n9 unused\n")
    return folder


def msrvtt(folder: Path, frames: int = 15) -> Path:
    """JSON and one folder of frames per video."""
    videos, sentences = [], []
    for row, split in enumerate(("train", "train", "validate", "test")):
        for frame in range(frames):
            photo(folder / "frames" / f"video{row}" / f"{frame:03d}.jpg", 100 * row + frame)
        videos.append({"video_id": f"video{row}", "split": split, "category": 9 + row % 2, "id": row})
        sentences += [{"video_id": f"video{row}", "caption": f"clip {row} {k}", "sen_id": k} for k in range(2)]
    write(folder / "MSRVTT_data.json", json.dumps({"videos": videos, "sentences": sentences}))
    return folder


def mirflickr(folder: Path, n: int = 8) -> Path:
    """Images, tags, common tags and label files; of the last two items one has no common tag, the other no label."""
    for number in range(1, n + 2):
        photo(folder / "mirflickr" / f"im{number}.jpg", number)
        tags = "rare" if number == n else "sky\nsea\nsky\nrare" if number % 2 else "dog"
        write(folder / "mirflickr" / "meta" / "tags" / f"tags{number}.txt", tags)
    write(folder / "mirflickr" / "doc" / "common_tags.txt", "sky 845\ndog 641\nsea 301\n")
    notes = folder / "mirflickr25k_annotations_v080"
    for first, name in ((2, "animals"), (1, "sea")):
        write(notes / f"{name}.txt", "".join(f"{number}\n" for number in range(first, n + 1, 2)))
    write(notes / "sea_r1.txt", "3\n")
    write(notes / "README.txt", "not a label")
    return folder


def nuswide(folder: Path, n: int = 9, labels: int = 23) -> Path:
    """Lists, tags and ground truth; label k holds for the items after k, so that the last two are the rarest."""
    names = [f"actor\\{row:04d}_{row}.jpg" for row in range(n)]
    for row in range(n):
        photo(folder / "Flickr" / "actor" / f"{row:04d}_{row}.jpg", row)
    write(folder / "ImageList" / "Imagelist.txt", "\n".join(names) + "\n")
    tags = ["\t".join(str(int(column % n == row and row > 1)) for column in range(1000)) + "\t" for row in range(n)]
    write(folder / "NUS_WID_Tags" / "AllTags1k.txt", "\n".join(tags) + "\n")
    write(folder / "NUS_WID_Tags" / "TagList1k.txt", "\n".join(f"word{column}" for column in range(1000)))
    for label in range(labels):
        # Item 0 has only the rarest label, which is cut off.
        column = [str(int(row == 0 if label == labels - 1 else row >= 1 + label % 4)) for row in range(n)]
        write(folder / "Groundtruth" / "AllLabels" / f"Labels_l{label:02d}.txt", "\n".join(column) + "\n")
    return folder


def wikipedia(folder: Path) -> Path:
    """Texts in XML, images by class, and the two lists."""
    lists: Mapping[str, Sequence[tuple[int, int]]] = {
        "trainset": [(0, 1), (1, 2)],
        "testset": [(2, 1), (3, 9), (4, 10)],
    }
    names = {1: "art", 2: "biology", 9: "sport", 10: "warfare"}
    for part, pairs in lists.items():
        lines = []
        for number, category in pairs:
            photo(folder / "images" / names[category] / f"img{number}.jpg", number)
            write(
                folder / "texts" / f"txt{number}-7.xml",
                # Not all copies of the files have a separate element for the text.
                f"<?xml version='1.0'?>\n<document>A &amp; {number}\n"
                if number == 0
                else f"<?xml version='1.0'?>\n<document><title>T</title><text>A &amp; {number}\n</text>",
            )
            lines.append(f"txt{number}-7\timg{number}\t{category}")
        write(folder / f"{part}_txt_img_cat.list", "\n".join(lines) + "\n")
    return folder


def pascal(folder: Path, per_class: int = 3) -> Path:
    """Images and sentences, both with one folder per class."""
    for row in range(2 * per_class):
        name = f"{('cat', 'sofa')[row % 2]}/2008_{row:06d}"
        photo(folder / "dataset" / f"{name}.jpg", row)
        write(folder / "sentence" / f"{name}.txt", f"One {row}.\nTwo {row}.\n")
    return folder


def manifest(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write a JSONL manifest and the images of the rows that have one."""
    for number, row in enumerate(rows):
        if "image" in row:
            photo(folder / str(row["image"]), number)
    return write(folder / "list.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def matconvnet(path: Path, *, old: bool = False) -> Path:
    """A MatConvNet file: conv, relu, lrn, pool with padding on two sides, fc6, fc7, classifier."""
    scipy_io = pytest.importorskip("scipy.io")
    generator = np.random.default_rng(4)

    def conv(shape: tuple[int, ...], **more: Any) -> dict[str, Any]:
        filters = generator.standard_normal(shape).astype(np.float32) / 50
        biases = generator.standard_normal(shape[-1]).astype(np.float32)
        parts = np.empty(2, dtype=object)
        parts[:] = [filters, biases]
        return {"type": "conv", **more, **({"filters": filters, "biases": biases} if old else {"weights": parts})}

    layers = np.empty(9, dtype=object)
    layers[:] = [
        conv((11, 11, 3, 8), stride=[4, 4], pad=0),
        {"type": "relu"},
        {"type": "normalize", "param": [5, 2, 1e-4, 0.75]},
        {"type": "pool", "method": "max", "pool": [3, 3], "stride": [2, 2], "pad": [0, 1, 0, 1]},
        conv((27, 27, 8, 6), stride=1, pad=0),
        {"type": "relu"},
        conv((1, 1, 6, 7)),
        {"type": "relu"},
        conv((1, 1, 7, 5)),
    ]
    normalization = {"averageImage": np.full((224, 224, 3), 100, np.float32)}
    about = {"normalization": normalization} if old else {"meta": {"normalization": normalization}}
    scipy_io.savemat(path, {"layers": layers, **about})
    return path


# --- images in archives and tables ----------------------------------------------------------------------------------

CAPTIONS = {"1": ("a dog runs", "a brown dog"), "2": ("a red car",), "3": ("two boats | at sea",)}


def photos(folder: Path) -> dict[str, Path]:
    """Three photos, by number."""
    paths = {number: folder / f"{number}.png" for number in CAPTIONS}
    for number, path in paths.items():
        photo(path, int(number))
    return paths


def table(folder: Path, **more: list[Any]) -> Any:
    """A table of the photos with their captions."""
    arrow = pytest.importorskip("pyarrow")
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in photos(folder / "src").values()]
    return arrow.table({"image": images, "caption": list(map(list, CAPTIONS.values())), **more})


def add(archive: tarfile.TarFile, name: str, content: bytes, **about: Any) -> None:
    """Add a file to an archive."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in about.items():
        setattr(info, key, value)
    archive.addfile(info, io.BytesIO(content))


def with_texts(folder: Path) -> tuple[str, Path]:
    for number, path in photos(folder).items():
        path.with_suffix(".txt").write_text("\n".join(CAPTIONS[number]) + "\n\n")
    (folder / "README.txt").write_text("no picture of this name")
    return "folder", folder


def imagefolder(folder: Path) -> tuple[str, Path]:
    photos(folder)
    lines = [{"file_name": f"{number}.png", "captions": list(CAPTIONS[number]), "width": 16} for number in CAPTIONS]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "folder", folder


def parquet(folder: Path) -> tuple[str, Path]:
    found = table(folder)
    pytest.importorskip("pyarrow.parquet").write_table(found, folder / "photos.parquet", row_group_size=2)
    return "parquet", folder / "photos.parquet"


def arrow_stream(folder: Path) -> tuple[str, Path]:
    arrow, found = pytest.importorskip("pyarrow"), table(folder)
    with arrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), found.schema) as writer:
        writer.write_table(found, max_chunksize=2)
    return "parquet", folder / "data-00000-of-00001.arrow"


def tar(folder: Path) -> tuple[str, Path]:
    with tarfile.open(folder / "00000.tar", "w") as archive:
        for number, path in photos(folder / "src").items():
            add(archive, f"set/{number}.png", path.read_bytes())
            if number == "1":
                add(archive, f"set/{number}.txt", "\n".join(CAPTIONS[number]).encode())
            else:
                add(archive, f"set/{number}.json", json.dumps({"caption": CAPTIONS[number][0], "width": 16}).encode())
    return "webdataset", folder / "00000.tar"


def in_csv(folder: Path) -> tuple[str, Path]:
    photos(folder)
    labels, splits = {"1": "['a', 'b']", "2": "a"}, {"3": "test"}
    with (folder / "list.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["image", "captions", "labels", "split"])
        for number, captions in CAPTIONS.items():
            lines.writerow([f"{number}.png", json.dumps(captions), labels.get(number), splits.get(number, "train")])
    return "manifest", folder / "list.csv"


def in_jsonl(folder: Path) -> tuple[str, Path]:
    photos(folder)
    items = [{"image": f"{number}.png", "captions": CAPTIONS[number], "labels": ["x", 1]} for number in CAPTIONS]
    (folder / "list.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return "manifest", folder / "list.jsonl"


#: What writes the photos with their captions into a folder, in each form; returns the data set and its path.
FORMS: Mapping[str, Callable[[Path], tuple[str, Path]]] = {
    "texts": with_texts,
    "imagefolder": imagefolder,
    "csv": in_csv,
    "jsonl": in_jsonl,
    "parquet": parquet,
    "arrow": arrow_stream,
    "tar": tar,
}
#: Data sets in the layouts in which they are distributed, by name.
PUBLISHED: Mapping[str, Callable[[Path], Path]] = {
    "flickr8k": flickr8k_release,
    "flickr30k": lambda folder: flickr(folder, "flickr30k"),
    "coco": coco,
    "iapr": iapr,
    "msrvtt": lambda folder: msrvtt(folder, frames=2),
    "mirflickr": mirflickr,
    "nuswide": nuswide,
    "wikipedia": wikipedia,
    "pascal": pascal,
}


def video(path: Path, frames: Sequence[Any], codec: str = "mpeg4") -> Path:
    """Write a video of frames uint8 [h, w, 3], with its index at the start."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w", options={"movflags": "faststart"} if path.suffix == ".mp4" else {}) as container:
        stream = container.add_stream(codec, rate=10)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path
