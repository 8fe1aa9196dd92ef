"""Sentence encoders from a local folder: a tiny BERT replaces the backbone's text encoder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fedmq.config.scenario import Backbone, Data
from fedmq.data.prepare import prepare
from fedmq.data.prepared_arrays import Prepared
from fedmq.encoders import sentences
from fedmq.errors import InputError
from tests import data_set_folders

pytestmark = pytest.mark.slow

WIDTH = 32
WORDS = ("picture", "as", "number", "sees", "it", "0", "1", "2", "3", "4", "5", "k")


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A one-layer BERT with random weights as transformers saves it, without a pooling module."""
    import transformers

    folder = tmp_path / "bert"
    folder.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=40, **sizes)
    with torch.random.fork_rng():
        transformers.BertModel(config).save_pretrained(folder, safe_serialization=True)
    return folder


def prepared(tmp_path: Path, folder: Path) -> Prepared:
    data_set_folders.flickr(tmp_path / "set")
    # The image side needs no pretrained weights: a MatConvNet file will do.
    backbone = Backbone(
        name="matconvnet",
        pretrained=str(data_set_folders.matconvnet(tmp_path / "f.mat")),
        text_encoder=folder,
        head="mlp",
    )
    return prepare(Data(name="flickr8k", path=tmp_path / "set"), backbone, tmp_path / "cache")


def test_text_features_are_the_mean_of_the_encoders_token_vectors(bert: Path, tmp_path: Path) -> None:
    import transformers

    found = prepared(tmp_path, bert)
    assert found.text.shape == (12, WIDTH)
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(bert), transformers.BertModel.from_pretrained(bert)
    with torch.no_grad():
        for row in range(6):
            tokens = tokenizer(f"picture {row} as number 0 sees it", return_tensors="pt")
            wanted = model(**tokens).last_hidden_state[0].mean(0)
            assert np.allclose(found.text[found.first[row]], wanted.numpy(), atol=1e-5)


def test_other_weights_give_other_features(bert: Path) -> None:
    before = sentences.weights_digest(bert)
    assert sentences.weights_digest(bert) == before
    weights = bert / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    assert sentences.weights_digest(bert) != before


def test_pickled_weights_and_folders_without_an_encoder_are_one_line_errors(bert: Path, tmp_path: Path) -> None:
    weights = bert / "model.safetensors"
    weights.rename(bert / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"text_encoder: .*no model\.safetensors in it"):
        prepared(tmp_path, bert)
    weights.write_bytes(b"no tensors")
    with pytest.raises(InputError, match="text_encoder: ") as caught:
        prepared(tmp_path, bert)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"text_encoder: .*no such folder"):
        prepared(tmp_path, tmp_path / "nowhere")


@pytest.mark.parametrize("other", [{"name": "features"}, {"name": "ViT-B-32", "adapter_site": "blocks"}])
def test_a_sentence_encoder_is_refused_where_no_text_is_encoded(other: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"text_encoder cannot be combined with backbone\."):
        Backbone.model_validate({**other, "text_encoder": str(tmp_path)})


def test_a_bag_of_words_is_refused_by_a_sentence_encoder(bert: Path, tmp_path: Path) -> None:
    data_set_folders.mirflickr(tmp_path / "set", 12)
    data = Data(name="mirflickr", path=tmp_path / "set", queries=2, val=1, train=4)
    with pytest.raises(InputError, match=r"data\.text: found 'bag with backbone\.text_encoder'"):
        prepare(data, Backbone(name="lite", text_encoder=bert, head="mlp"), tmp_path / "cache")


def _changed(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _without_queries(folder: Path) -> None:
    path = folder / "model.safetensors"
    kept = {name: value for name, value in load_file(path).items() if "query.weight" not in name}
    save_file(kept, path, {"format": "pt"})


@pytest.mark.parametrize(
    "change",
    [
        _without_queries,
        lambda folder: _changed(folder / "config.json", model_type="gpt2"),
        lambda folder: (folder / "modules.json").write_text('[{"type": "os.system", "path": ""}]'),
        lambda folder: (folder / "modules.json").write_text("no JSON"),
        lambda folder: (folder / "modules.json").write_text(
            '[{"type": "sentence_transformers.models.Pooling", "path": "../.."}]'
        ),
    ],
)
def test_a_folder_that_lacks_weights_or_asks_for_other_modules_is_refused(
    bert: Path, change: Callable[[Path], object]
) -> None:
    encode, cut = sentences.load(bert, "cpu")
    assert encode(["picture 1"]).shape == (1, WIDTH) and cut(["picture"] * 2) == [False, False]
    change(bert)
    with pytest.raises(InputError, match="text_encoder: ") as caught:
        sentences.load(bert, "cpu")
    assert "\n" not in str(caught.value)


def test_a_dense_layer_larger_than_its_weights_is_refused(bert: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer, models

    parts = (models.Transformer(str(bert)), models.Pooling(WIDTH), models.Dense(WIDTH, 5))
    SentenceTransformer(modules=parts, device="cpu").save(str(tmp_path / "all"))
    encode, _ = sentences.load(tmp_path / "all", "cpu")
    assert encode(["picture 1"]).shape == (1, 5)
    _changed(tmp_path / "all" / "2_Dense" / "config.json", out_features=1 << 20)
    with pytest.raises(InputError, match="text_encoder: "):
        sentences.load(tmp_path / "all", "cpu")


def test_an_encoder_that_computes_no_number_is_refused(bert: Path) -> None:
    path = bert / "model.safetensors"
    save_file({name: value * float("nan") for name, value in load_file(path).items()}, path, {"format": "pt"})
    encode, _ = sentences.load(bert, "cpu")
    with pytest.raises(InputError, match="values that are not finite"):
        encode(["picture"])
