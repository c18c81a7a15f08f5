from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from zero_offload.base.errors import ConfigError
from zero_offload.finetune.pretrain.corpus import BatchShape, load_corpus, train_batch, validation_batch

SHAPE = BatchShape(batch=4, seq=16, seed=7)


def _write_files(folder: Path, num_files: int = 200, nbytes: int = 50) -> Path:
    folder.mkdir()
    for index in range(num_files):
        (folder / f"{index:03}.txt").write_bytes(bytes([index]) * nbytes if index else b"a" * nbytes)
    return folder


@pytest.fixture
def counting(tmp_path: Path) -> Path:
    path = tmp_path / "counting.bin"
    path.write_bytes(bytes(range(1, 251)) * 20)
    return path


def test_standard_library_is_the_default() -> None:
    corpus = load_corpus((), seq=128)
    assert len(corpus.train) > 5 * len(corpus.validation) > 5 * 128
    assert 2.5 < corpus.unigram_nats < 4.0
    assert corpus.unigram_bits == pytest.approx(corpus.unigram_nats / math.log(2))
    assert "standard library" in corpus.description
    assert load_corpus((), seq=128).fingerprint == corpus.fingerprint


def test_a_batch_is_consecutive_bytes_and_what_follows(counting: Path) -> None:
    batch = train_batch(load_corpus([counting], 16), SHAPE, step=3, rank=0, micro=0)
    assert batch.inputs.shape == batch.targets.shape == (4, 16)
    assert batch.inputs.dtype == torch.int64
    assert torch.equal(batch.targets[:, :-1], batch.inputs[:, 1:])
    assert torch.equal(batch.targets, batch.inputs % 250 + 1)


def test_a_batch_is_a_function_of_its_name(counting: Path) -> None:
    corpus = load_corpus([counting], 16)
    names = [(step, rank, micro) for step in (1, 2) for rank in (0, 1) for micro in (0, 1)]
    batches = [train_batch(corpus, SHAPE, *name).inputs for name in names]
    again = [train_batch(corpus, SHAPE, *name).inputs for name in reversed(names)]
    assert all(torch.equal(one, other) for one, other in zip(batches, reversed(again), strict=True))
    assert len({batch.numpy().tobytes() for batch in batches}) == len(names)
    reseeded = train_batch(corpus, BatchShape(4, 16, seed=8), *names[0]).inputs
    assert not torch.equal(reseeded, batches[0])


def test_every_window_can_be_drawn_and_none_beyond_the_end(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(bytes(range(100)))
    corpus = load_corpus([path], seq=4)  # 95 bytes to train: starts 0 to 90
    shape = BatchShape(batch=64, seq=4, seed=0)
    starts = {int(row[0]) for step in range(40) for row in train_batch(corpus, shape, step, 0, 0).inputs}
    assert starts == set(range(91))


def test_a_single_file_is_split_by_position(counting: Path) -> None:
    corpus = load_corpus([counting], 16)
    whole = np.frombuffer(counting.read_bytes(), dtype=np.uint8)
    assert len(corpus.validation) == 250
    assert np.array_equal(np.concatenate((corpus.train, corpus.validation)), whole)
    assert "last 5%" in corpus.description


def test_files_are_split_by_their_names(tmp_path: Path) -> None:
    folder = _write_files(tmp_path / "many")
    corpus = load_corpus([folder], seq=16)
    train, validation = set(corpus.train.tolist()), set(corpus.validation.tolist())
    assert validation and not train & validation  # each file holds one byte value of its own
    assert 2 <= len(validation) <= 25  # about 5% of 200
    (folder / "new.txt").write_bytes(b"\xff" * 50)
    grown = load_corpus([folder], seq=16)
    assert validation <= set(grown.validation.tolist())
    assert grown.fingerprint != corpus.fingerprint


def test_few_files_fall_back_to_a_split_by_position(tmp_path: Path) -> None:
    folder = _write_files(tmp_path / "few", num_files=2, nbytes=1000)
    corpus = load_corpus([folder], seq=16)
    assert len(corpus.validation) == 100
    assert "too few files" in corpus.description


def test_binary_hidden_and_cached_files_are_left_out(tmp_path: Path) -> None:
    folder = _write_files(tmp_path / "mixed", num_files=3)
    (folder / "image.bin").write_bytes(b"\0" * 500)
    (folder / ".hidden").write_bytes(b"h" * 500)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "cached.txt").write_bytes(b"c" * 500)
    assert "in 3 files" in load_corpus([folder], seq=4).description


def test_validation_batches_are_fixed_and_numbered(counting: Path) -> None:
    corpus = load_corpus([counting], 16)
    first, second = (validation_batch(corpus, SHAPE, index).inputs for index in (0, 1))
    assert torch.equal(first, validation_batch(corpus, SHAPE, 0).inputs)
    assert not torch.equal(first, second)


def test_unigram_entropy_of_known_text(tmp_path: Path) -> None:
    path = tmp_path / "four.txt"
    path.write_bytes(b"abcd" * 100)
    corpus = load_corpus([path], seq=4)
    assert corpus.unigram_bits == pytest.approx(2.0)


def test_every_bad_path_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError) as caught:
        load_corpus([tmp_path / "missing.txt", tmp_path / "empty.txt", tmp_path / "folder"], seq=4)
    message = str(caught.value)
    assert "missing.txt: no such file" in message
    assert "empty.txt: the file is empty" in message
    assert "folder: the directory holds no text file" in message


def test_text_shorter_than_a_sequence_is_refused_with_numbers(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 300)
    with pytest.raises(ConfigError, match=r"285 bytes to train and 15 to validate.*128 \+ 1.*2580 bytes"):
        load_corpus([path], seq=128)
