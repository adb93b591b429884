"""Texts as data: windows, masks, lines and blocks, and what is wrong with files and tokenizers."""

from __future__ import annotations

import json
import math
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mutants import changed_json, changed_values, damaged_bytes, unclean
from tiny_language import SPECIAL, WORDS, llama, text, write_tokenizer
from torch import Tensor

from prunekit.data import texts
from prunekit.data.loader import batches
from prunekit.data.sources import load_splits
from prunekit.data.splits import Splits
from prunekit.data.texts import PIECE, _pieces, open_tokenizer, training_text
from prunekit.errors import DataError, UsageError
from prunekit.measure.accuracy import evaluate
from prunekit.settings.inputs import DataSettings
from prunekit.tasks.task import get_task
from prunekit.tasks.texts import IGNORED

MASK, BEGIN, END, PAD = (SPECIAL.index(name) for name in ("[MASK]", "[CLS]", "[SEP]", "[PAD]"))


@pytest.fixture
def settings(tmp_path: Path) -> DataSettings:
    write_tokenizer(tmp_path / "tokens")
    (tmp_path / "text.txt").write_text(text(1000))
    return DataSettings("text", root=tmp_path / "text.txt", tokenizer=tmp_path / "tokens", window=10)


def rows(splits: Splits, part: str) -> Tensor:
    data = getattr(splits, part)
    inputs, _ = data.fetch(torch.arange(len(data)))
    return inputs["input_ids"]


def ids_of(words: str) -> list[int]:
    return [len(SPECIAL) + WORDS.index(word) for word in words.split()]


def test_windows_are_the_text_in_blocks(settings: DataSettings) -> None:
    splits = load_splits(settings, "causal_lm")
    parts = [rows(splits, name) for name in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [60, 10, 30]
    assert torch.cat(parts).flatten().tolist() == ids_of(text(1000))
    assert (splits.sample_shape, splits.vocabulary, splits.classes) == ((10,), len(SPECIAL) + len(WORDS), ())
    inputs, following = splits.test.fetch(torch.tensor([0, 1]))
    assert list(inputs) == ["input_ids"]
    assert torch.equal(following[:, :-1], inputs["input_ids"][:, 1:])
    assert load_splits(settings, "causal_lm").fingerprint == splits.fingerprint
    other = load_splits(replace(settings, window=20), "causal_lm")
    assert other.fingerprint != splits.fingerprint
    assert len(rows(other, "test")) == 15


def test_masks_are_drawn_once_as_bert_draws_them(settings: DataSettings, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokens", special=True)
    (tmp_path / "text.txt").write_text(text(20000))
    settings = replace(settings, window=50)
    splits = load_splits(settings, "masked_lm")
    inputs, labels = splits.train.fetch(torch.arange(len(splits.train)))
    ids = inputs["input_ids"]
    assert set(ids[:, 0].tolist()) == {BEGIN}
    assert set(ids[:, -1].tolist()) == {END}
    counted = labels != IGNORED
    assert not counted[:, [0, -1]].any()
    assert bool(counted.any(1).all())
    known = torch.where(counted, labels, ids)[:, 1:-1].flatten()
    assert known.tolist() == ids_of(text(20000))[: len(known)]
    shares = [float(counted[:, 1:-1].float().mean())]
    shares += [float(found.float().mean()) for found in (ids[counted] == MASK, ids[counted] == labels[counted])]
    assert shares == pytest.approx([0.15, 0.8, 0.1 + 0.1 / 45], abs=0.02)
    again, _ = splits.train.fetch(torch.tensor([3]), draw=(1, 2))
    assert torch.equal(again["input_ids"][0], ids[3])
    drawn = load_splits(replace(settings, split_seed=1), "masked_lm")
    assert not torch.equal(rows(drawn, "train"), ids)
    one = load_splits(replace(settings, window=3), "masked_lm")
    assert bool((one.train.fetch(torch.arange(200))[1][:, 1] != IGNORED).all())


def test_lines_are_texts_of_several_lengths(settings: DataSettings, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokens", special=True)
    lines = ["w1 w2", "", "w3", "   ", "w4 w5 w6 w7 w8 w9 w10 w11 w12", "w7", "w8 w9", "w1", "w2", "w3 w3"]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    splits = load_splits(replace(settings, window=6, test_share=0.25, validation_share=0.25), "embedding")
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [4, 2, 2]
    inputs, samples = splits.train.fetch(torch.tensor([0, 1, 2]))
    first, last = ids_of("w1 w2"), ids_of("w4 w5 w6 w7")
    assert inputs["input_ids"].tolist() == [
        [BEGIN, *first, END, PAD, PAD],
        [BEGIN, *ids_of("w3"), END, PAD, PAD, PAD],
        [BEGIN, *last, END],
    ]
    assert inputs["attention_mask"].sum(1).tolist() == [4, 3, 6]
    assert [sorted(sample) for sample in samples] == [["attention_mask", "input_ids"]] * 3


def test_files_of_a_folder_and_lines_of_json_follow_each_other(settings: DataSettings, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text("w3 w4")
    entries = [json.dumps({"text": words, "more": 1}) for words in ("w1", "w2 w2 w2 w2 w2 w2 w2 w2")]
    (folder / "a.jsonl").write_text("\n\n".join(entries))
    (folder / "c.md").write_text("w9")
    found = load_splits(replace(settings, root=folder, window=3), "causal_lm")
    ids = torch.cat([rows(found, name) for name in ("train", "validation", "test")]).flatten().tolist()
    between = [END]  # the end token separates texts
    assert ids == [*ids_of("w1"), *between, *ids_of("w2 " * 8), *between, *ids_of("w3")]
    (folder / "d.txt").write_text("w5\nw6\n")
    lines = load_splits(replace(settings, root=folder, window=3), "embedding")
    assert [len(part) for part in (lines.train, lines.validation, lines.test)] == [2, 1, 2]


def test_long_texts_are_read_in_pieces_that_end_with_lines() -> None:
    whole = ("word " * 20 + "\n\n") * (2 * PIECE // 100)
    pieces = list(_pieces([whole]))
    assert len(pieces) == 3
    assert "".join(pieces) == whole
    assert all(piece.endswith("\n") and not piece[0].isspace() for piece in pieces)
    assert list(_pieces(["x" * (2 * PIECE)])) == ["x" * (2 * PIECE)]
    for size in (1000, PIECE - 1, PIECE + 1):
        assert list(_pieces(whole[at : at + size] for at in range(0, len(whole), size))) == pieces


def test_long_lines_are_cut_at_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "PIECE", 5)
    monkeypatch.setattr(texts, "LONGEST", 10)
    assert list(_pieces("one two three four five")) == ["one two", " three", " four five"]
    assert list(_pieces("x" * 23)) == ["x" * 10, "x" * 10, "xxx"]
    assert list(_pieces("one two\n\n\nthree")) == ["one two\n\n\n", "three"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "task"), [("a.txt", "causal_lm"), ("a.jsonl", "masked_lm")])
def test_texts_may_be_larger_than_the_memory(
    settings: DataSettings, tmp_path: Path, name: str, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither text nor tokens are ever whole in memory, and the file of tokens has no name that could be left over."""
    (tmp_path / "room").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "room"))
    monkeypatch.setattr(texts, "PIECE", 10_000)
    write_tokenizer(tmp_path / "tokens", special=True)
    words = text(2000)
    content = json.dumps({"text": words}) + "\n" if name == "a.jsonl" else words
    count = 6_000_000 // len(content)
    (tmp_path / name).write_text(content * count)
    tracemalloc.start()
    try:
        splits = load_splits(replace(settings, root=tmp_path / name, window=50), task)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8_000_000  # read whole it would be twice as much
    assert not list((tmp_path / "room").iterdir())
    total = len(splits.train) + len(splits.validation) + len(splits.test)
    assert total == (count * 2000 // 50 if task == "causal_lm" else (count * 2001 - 1) // 48)


def test_no_room_for_tokens_is_said(settings: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(
        DataError, match=r"tokens of texts lie in a file in .*none, .* set TMPDIR to a folder with more"
    ):
        load_splits(settings, "causal_lm")


def test_columns_of_texts_keep_their_parts(settings: DataSettings, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra hf-data is not installed")
    parts = {"train": ["w1 w2 w3"] * 8, "test": ["w4 w5", "w6 w7 w8"]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": rows}) for name, rows in parts.items()})
    saved.save_to_disk(str(tmp_path / "saved"))
    known = replace(settings, source="huggingface", root=tmp_path / "saved", window=2)
    found = load_splits(known, "causal_lm")
    assert [len(part) for part in (found.train, found.validation, found.test)] == [13, 2, 3]
    assert rows(found, "test").tolist() == [ids_of("w4 w5"), [END, *ids_of("w6")], ids_of("w7 w8")]
    other = datasets.Dataset.from_dict({"a": ["w1"], "b": ["w2"]})
    other.save_to_disk(str(tmp_path / "two"))
    with pytest.raises(UsageError, match="expected a column named text, or one of strings alone, got a, b"):
        load_splits(replace(known, root=tmp_path / "two"), "causal_lm")


@pytest.mark.parametrize(
    ("name", "content", "task", "message"),
    [
        ("short.txt", b"w1 w2 w3", "causal_lm",
         r"windows of 10 tokens: expected at least 4, .* got 0 of 3 tokens; give more text$"),
        ("few.txt", b"w1\n\nw2", "embedding", r"lines: expected at least 4, of which training needs two, got 2 of 2"),
        ("image.txt", b"\xff\xd8\xff", "causal_lm", r"image.txt:1: expected a .txt file .* byte 0 is not UTF-8"),
        ("zeros.txt", b"a\0b", "causal_lm", r"zeros.txt:1: expected a .txt file .* there is a zero byte"),
        ("rows.jsonl", b'{"text": "w1"}\n\n{"words": 3}', "causal_lm", r"rows.jsonl:3: expected an object with a"),
        ("odd.jsonl", b"{", "causal_lm", r'odd.jsonl:1:2: expected an object with a "text" on each line, but'),
        ("all.txt", b"w1", "masked_lm", r"windows of 10 tokens: expected at least 4"),
    ],
)  # fmt: skip
def test_files_that_are_no_texts(
    settings: DataSettings, tmp_path: Path, name: str, content: bytes, task: str, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_splits(replace(settings, root=tmp_path / name), task)


def no_tokenizer(settings: DataSettings, folder: Path) -> DataSettings:
    return replace(settings, tokenizer=None)


def no_file(settings: DataSettings, folder: Path) -> DataSettings:
    return replace(settings, tokenizer=folder)


def damaged(settings: DataSettings, folder: Path) -> DataSettings:
    (folder / "tokens" / "tokenizer.json").write_text("{}")
    return settings


def narrow(settings: DataSettings, folder: Path) -> DataSettings:
    write_tokenizer(folder / "tokens", special=True)
    return replace(settings, window=2)


def images(settings: DataSettings, folder: Path) -> DataSettings:
    return replace(settings, augment="flip")


def missing(settings: DataSettings, folder: Path) -> DataSettings:
    return replace(settings, root=folder / "nothing")


def empty(settings: DataSettings, folder: Path) -> DataSettings:
    (folder / "empty").mkdir()
    return replace(settings, root=folder / "empty")


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (no_tokenizer, UsageError, r"data\.tokenizer: texts need a tokenizer, got none: give the folder that has its"),
        (no_file, DataError, r"data\.tokenizer: .*tokenizer\.json does not exist: expected a folder with"),
        (damaged, DataError, r"expected a tokenizer as the package tokenizers writes it, but"),
        (narrow, UsageError, r"data\.window: expected more than the 2 tokens around each text, got 2"),
        (images, UsageError, r"data\.augment would change nothing"),
        (missing, DataError, r"data\.root: .*nothing does not exist; expected a file of text"),
        (empty, DataError, r"or a folder with \.txt or \.jsonl files, found none"),
    ],
)
def test_what_is_missing_is_said(
    settings: DataSettings, tmp_path: Path, change: Callable[..., Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        load_splits(change(settings, tmp_path), "masked_lm")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": ' + "9" * 5000 + "}", "a number has thousands of digits"),
        ("[" * 100_000, "more than 100 deep"),
        ('{"a":' * 50_000, "more than 100 deep"),
        ('{"text": "\\ud800"}', "not Unicode"),
        ('{"text": "a", "text": "b"}', "the key 'text' is there twice"),
    ],
    ids=["digits", "lists", "mappings", "surrogate", "twice"],
)
def test_lines_that_break_parsers_are_named(settings: DataSettings, tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "w1"}\n\n' + line)
    with pytest.raises(DataError, match=f"rows.jsonl.*{reason}"):
        load_splits(replace(settings, root=tmp_path / "rows.jsonl"), "causal_lm")


def test_lines_end_where_json_lines_end(settings: DataSettings, tmp_path: Path) -> None:
    """In JSON's text the signs U+2028 and U+0085 may stand as they are, at which Python's lines end."""
    lines = [json.dumps({"text": f"{text(50)}\u2028{text(50)}\x85"}, ensure_ascii=False) for _ in range(10)]
    (tmp_path / "rows.jsonl").write_text("\r\n".join(lines), newline="")
    splits = load_splits(replace(settings, root=tmp_path / "rows.jsonl"), "causal_lm")
    assert len(splits.train) + len(splits.validation) + len(splits.test) == 100


def read_whole(settings: DataSettings, task: str) -> None:
    splits = load_splits(settings, task)
    for part in (splits.train, splits.validation, splits.test):
        part.fetch(torch.arange(len(part)))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["causal_lm", "embedding"])
def test_mutants_of_texts_are_read_whole_or_refused(settings: DataSettings, tmp_path: Path, task: str) -> None:
    lines = [{"text": text(40), "id": number} for number in range(12)]
    sound = "".join(json.dumps(line) + "\n" for line in lines).encode()

    def read(mutant: tuple[str, bytes]) -> None:
        file = tmp_path / mutant[0]
        file.write_bytes(mutant[1])
        read_whole(replace(settings, root=file), task)

    seed = len(task)
    mutants = [("rows.jsonl", each) for each in damaged_bytes(sound, 80, seed)]
    mutants += [
        ("rows.jsonl", "\n".join(map(json.dumps, each)).encode())
        for each in changed_values(lines, 80, seed)
        if isinstance(each, list)
    ]
    mutants += [("text.txt", each) for each in damaged_bytes(text(500).encode(), 60, seed)]
    assert unclean(read, mutants) == []


@pytest.mark.slow
@pytest.mark.parametrize("task", ["causal_lm", "masked_lm", "embedding"])
def test_mutants_of_tokenizers_are_used_whole_or_refused(settings: DataSettings, tmp_path: Path, task: str) -> None:
    write_tokenizer(tmp_path / "tokens", special=True)
    files = {path.name: json.loads(path.read_text()) for path in sorted((tmp_path / "tokens").glob("*.json"))}
    assert "tokenizer.json" in files
    files.setdefault("tokenizer_config.json", {"mask_token": "[MASK]", "pad_token": {"content": "[PAD]"}})

    def read(mutant: tuple[str, bytes]) -> None:
        for name, sound in files.items():
            (tmp_path / "tokens" / name).write_text(json.dumps(sound))
        (tmp_path / "tokens" / mutant[0]).write_bytes(mutant[1])
        read_whole(settings, task)

    count = 240 // len(files)
    mutants = [(name, each) for name, sound in files.items() for each in changed_json(sound, count, seed=len(task))]
    assert unclean(read, mutants) == []


def test_strided_windows_count_as_in_the_loop_of_hugging_face(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text(text(400))
    whole = DataSettings("text", root=tmp_path / "text.txt", tokenizer=tmp_path / "tokenizer", window=16)
    ids = rows(load_splits(whole, "causal_lm"), "test").flatten()
    model = llama(initializer_range=0.3).double()
    for stride in (16, 12, 4):
        splits = load_splits(replace(whole, stride=stride), "causal_lm")
        found = evaluate(model, batches(splits.test, 3, shuffle_seed=None), splits.task, torch.device("cpu"))
        lost, counted, before = 0.0, 0, 0
        for begin in range(0, len(ids) - 15, stride):  # the page's loop, with the losses added up token by token
            window = ids[None, begin : begin + 16]
            labels = window.clone()
            labels[:, : -(begin + 16 - before)] = -100
            number = int((labels[:, 1:] != -100).sum())
            with torch.no_grad():
                lost += float(model(input_ids=window, labels=labels).loss) * number
            counted, before = counted + number, begin + 16
        assert found.counts[1] == counted
        assert found.values["perplexity"] == pytest.approx(math.exp(lost / counted), rel=1e-6)
    plain = load_splits(whole, "causal_lm")
    same = load_splits(replace(whole, stride=16), "causal_lm")
    one, other = (
        evaluate(model, batches(some.test, 3, shuffle_seed=None), some.task, torch.device("cpu"))
        for some in (plain, same)
    )
    assert one == other
    assert plain.spelled is not None
    tokens, size = plain.spelled()
    assert (tokens, size) == (len(ids), len(" ".join((*SPECIAL, *WORDS)[at] for at in ids.tolist())))


def test_the_training_text_is_that_of_the_training_windows(settings: DataSettings) -> None:
    train = load_splits(settings, "causal_lm").train
    found = " ".join(training_text(settings, get_task("causal_lm"))).split()
    assert found == text(1000).split()[: 10 * len(train)]


@pytest.mark.parametrize(("task", "stride"), [("causal_lm", 17), ("masked_lm", 4)])
def test_strides_that_count_nothing_are_refused(tmp_path: Path, task: str, stride: int) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text(text(400))
    given = DataSettings("text", root=tmp_path / "text.txt", tokenizer=tmp_path / "tokenizer", window=16, stride=stride)
    expected = "at most 16, the window" if task == "causal_lm" else "nothing, as it is for causal_lm"
    with pytest.raises(UsageError, match=f"data.stride: expected {expected}, got {stride}"):
        load_splits(given, task)


def test_empty_texts_are_no_data_and_short_ones_name_the_window_that_would_do(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    file = tmp_path / "texts.jsonl"
    given = DataSettings("text", root=file, tokenizer=tmp_path / "tokenizer", window=16)
    file.write_text('{"text": ""}\n{"text": " "}\n' * 200)
    with pytest.raises(DataError, match=r"got 0 of 0 tokens; give text$"):
        load_splits(given, "causal_lm")
    file.write_text(json.dumps({"text": text(40)}))
    with pytest.raises(DataError, match=r"got 2 of 40 tokens; give more text, or set data.window=10$"):
        load_splits(given, "causal_lm")
    assert len(load_splits(replace(given, window=10), "causal_lm").test) == 1


def test_a_text_is_read_no_further_than_to_enough_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    read: list[int] = []

    def blocks() -> Iterator[str]:
        for number in range(9):
            read.append(number)
            yield "some words\n" * 200_000

    whole = open_tokenizer(tmp_path).stream([["some words\n" * 1000]])
    found = open_tokenizer(tmp_path).stream([blocks()], 100)
    assert len(read) < 4
    assert len(found) >= 100
    assert found[:100].tolist() == whole[:100].tolist()
