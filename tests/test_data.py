"""Data: the order, the splits, the position, and what is refused."""

import json
from pathlib import Path

import grain.python as grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arena_jax import data
from arena_jax.errors import DataError

SIZES = st.integers(min_value=1, max_value=3000)
SEEDS = st.integers(min_value=0, max_value=2**32 - 1)


def corpus_of(num_tokens: int, vocabulary: int = 1 << 30) -> data.Corpus:
    """A corpus whose tokens are their own places."""
    return data.Corpus(
        tokens=np.arange(num_tokens), vocabulary=vocabulary, fingerprint=f"places-{num_tokens}", origin="a test"
    )


@given(num_samples=SIZES, seed=SEEDS, epoch=st.integers(0, 5))
def test_an_epoch_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    order = data.permute(np.arange(num_samples), num_samples=num_samples, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(order), np.arange(num_samples))


@given(num_samples=SIZES, seed=SEEDS, part=st.data())
def test_a_place_has_its_sample_whatever_is_asked_with_it(num_samples: int, seed: int, part: st.DataObject) -> None:
    whole = data.permute(np.arange(num_samples), num_samples=num_samples, seed=seed, epoch=1)
    places = np.array(part.draw(st.lists(st.integers(0, num_samples - 1), max_size=20)), dtype=np.int64)
    assert np.array_equal(data.permute(places, num_samples=num_samples, seed=seed, epoch=1), whole[places])


def test_seeds_and_epochs_give_unlike_and_unbiased_orders() -> None:
    num_samples = 1000
    orders = [
        data.permute(np.arange(num_samples), num_samples=num_samples, seed=seed, epoch=epoch)
        for seed in range(20)
        for epoch in range(20)
    ]
    assert len({order.tobytes() for order in orders}) == len(orders)
    # The first place's sample is uniform: mean and deviation of 400 draws, at four sigma.
    firsts = np.array([order[0] for order in orders]) / num_samples
    assert abs(firsts.mean() - 0.5) < 4 * (1 / 12) ** 0.5 / len(firsts) ** 0.5
    assert len(set(firsts)) > 250


def test_an_order_that_was_used_once_never_changes() -> None:
    """A checkpoint's position is worth nothing if the next release orders samples anew."""
    assert data.permute(np.arange(10), num_samples=10, seed=3, epoch=1).tolist() == [7, 5, 1, 8, 3, 4, 0, 9, 2, 6]


@settings(max_examples=40)
@given(seed=SEEDS, before=st.integers(0, 40), batch=st.integers(1, 13), other=st.integers(1, 13))
def test_resuming_is_exact_over_epochs_and_batch_sizes(seed: int, before: int, batch: int, other: int) -> None:
    source = data.TokenWindows(corpus_of(200), 4)
    straight = data.SampleLoader(source, global_batch=batch, seed=seed)
    for _ in range(before):
        next(straight)
    state = json.loads(json.dumps(straight.get_state()))
    resumed = data.SampleLoader(source, global_batch=batch, seed=seed)
    resumed.set_state(state)
    for _ in range(5):
        expected, got = next(straight), next(resumed)
        assert expected.keys() == got.keys()
        assert all(np.array_equal(expected[key], got[key]) for key in expected)
    # Another batch size goes on with the very next sample.
    resized = data.SampleLoader(source, global_batch=other, seed=seed)
    resized.set_state(state)
    ids, _ = straight.sample_ids(before * batch)
    more, _ = straight.sample_ids(before * batch + batch)
    assert np.array_equal(
        resized.sample_ids(resized.position)[0][:batch], np.concatenate([ids, more])[: min(other, batch)]
    )


def test_every_sample_comes_once_an_epoch() -> None:
    source = data.TokenWindows(corpus_of(5000), 7)
    loader = data.SampleLoader(source, global_batch=9, seed=1)
    seen = [place for number in range(400) for place in zip(*loader.sample_ids(9 * number), strict=True)]
    assert len(set(seen)) == len(seen)
    first = {int(i) for i, epoch in seen if epoch == 0}
    assert first == set(range(source.num_samples))


@given(num_tokens=st.integers(30, 20_000), length=st.integers(1, 70), fraction=st.sampled_from([0.05, 0.1, 0.34, 0.5]))
def test_splits_share_no_token_and_waste_little(num_tokens: int, length: int, fraction: float) -> None:
    tokens: dict[str, set[int]] = {}
    try:
        for split in ("train", "validation"):
            source = data.TokenWindows(corpus_of(num_tokens), length, split=split, validation_fraction=fraction)  # type: ignore[arg-type]
            windows = source.windows(np.arange(source.num_samples))
            assert np.array_equal(windows, windows[:, :1] + np.arange(length + 1))
            tokens[split] = set(windows.ravel().tolist())
    except DataError as error:
        assert "too short" in str(error)  # noqa: PT017
        assert num_tokens < 2 * (length + 1)
        return
    assert tokens["train"].isdisjoint(tokens["validation"])
    block = source._block_size
    assert len(tokens["train"]) + len(tokens["validation"]) > num_tokens - block


def test_targets_are_the_next_tokens() -> None:
    batch = data.TokenWindows(corpus_of(100), 5).read(np.arange(3), np.zeros(3, np.int64))
    assert np.array_equal(batch["targets"], batch["tokens"] + 1)
    assert batch["tokens"].dtype == np.int32
    assert batch["tokens"].shape == (3, 5)


def test_masks_depend_on_sample_and_epoch_alone() -> None:
    windows = data.TokenWindows(corpus_of(40_000, vocabulary=40_000), 64, vocabulary=40_008)
    source = data.MaskedWindows(windows, mask_token=40_001, seed=7)
    ids, epochs = np.arange(500), np.zeros(500, np.int64)
    batch = source.read(ids, epochs)
    alone = source.read(ids[17:18], epochs[17:18])
    assert all(np.array_equal(batch[key][17:18], alone[key]) for key in batch)
    later = source.read(ids, epochs + 1)
    assert not np.array_equal(batch["weights"], later["weights"])
    hidden = batch["weights"] == 1
    assert hidden.mean() == pytest.approx(0.15, abs=0.01)
    assert (batch["tokens"][hidden] == 40_001).mean() == pytest.approx(0.8, abs=0.02)
    assert (batch["tokens"][hidden] == batch["targets"][hidden]).mean() == pytest.approx(0.1, abs=0.02)
    assert np.array_equal(batch["tokens"][~hidden], batch["targets"][~hidden])


def test_the_standard_library_is_text_without_tests_and_tables() -> None:
    corpus = data.standard_library()
    assert corpus.tokens.size == 8_000_000 or corpus.tokens.size > 3_000_000
    assert corpus.fingerprint == data.standard_library().fingerprint
    # Python source is nearly all printable ASCII; a table or a binary would show here.
    printable = np.isin(corpus.tokens, np.frombuffer(bytes(range(32, 127)) + b"\n\t\r\f", np.uint8)).mean()
    assert printable > 0.99


def test_the_standard_library_is_sorted_capped_and_selected(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "a.py", "test/t.py", "a/tests/t.py", "site-packages/s.py", "encodings/e.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{name}>")
    (tmp_path / "data.txt").write_text("no source")
    corpus = data.standard_library(tmp_path)
    assert corpus.tokens.tobytes() == b"<a.py>\n<a/z.py>\n<b.py>\n"
    assert data.standard_library(tmp_path, max_bytes=9).tokens.tobytes() == b"<a.py>\n<a"


def test_text_globs(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "one.txt").write_text("one")
    (tmp_path / "two.txt").write_text("two")
    corpus = data.text_files(["**/*.txt"], base=tmp_path)
    assert corpus.tokens.tobytes() == b"two\none\n"
    with pytest.raises(DataError, match="no file matches"):
        data.text_files(["*.md"], base=tmp_path)
    (tmp_path / "empty.md").write_text("")
    with pytest.raises(DataError, match="no data"):
        data.text_files(["*.md"], base=tmp_path)


def test_token_files_are_mapped_not_read(tmp_path: Path) -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    np.save(tmp_path / "t.npy", tokens)
    tokens.tofile(tmp_path / "t.bin")
    for name in ("t.npy", "t.bin"):
        corpus = data.token_file(tmp_path / name)
        assert isinstance(corpus.tokens, np.memmap)
        assert corpus.vocabulary == 1000
        assert np.array_equal(corpus.tokens, tokens)
    before = data.token_file(tmp_path / "t.bin").fingerprint
    tokens[500] = 7
    tokens.tofile(tmp_path / "t.bin")
    assert data.token_file(tmp_path / "t.bin").fingerprint != before


def test_bad_token_files_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "floats.npy", np.zeros(4))
    np.save(tmp_path / "square.npy", np.zeros((4, 4), np.int32))
    np.save(tmp_path / "none.npy", np.zeros(0, np.int32))
    np.save(tmp_path / "pickled.npy", np.array([{}]), allow_pickle=True)
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "torn.npy").write_bytes((tmp_path / "square.npy").read_bytes()[:40])
    (tmp_path / "t.csv").write_text("1,2")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(DataError):
            data.token_file(path)
    with pytest.raises(DataError, match="cannot read"):
        data.token_file(tmp_path / "absent.npy")


def test_a_vocabulary_too_small_and_ids_out_of_range_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"vocabulary of 100 .* ids reach 255"):
        data.TokenWindows(corpus_of(500, vocabulary=256), 8, vocabulary=100)
    np.save(tmp_path / "negative.npy", np.array([3, -1, 2, 4] * 50))
    source = data.TokenWindows(data.token_file(tmp_path / "negative.npy"), 8)
    with pytest.raises(DataError, match="token -1"):
        source.read(np.arange(2), np.zeros(2, np.int64))
    with pytest.raises(DataError, match="mask token 256"):
        data.MaskedWindows(data.TokenWindows(corpus_of(200, 256), 8, vocabulary=256), mask_token=256)


def test_too_little_data_is_an_error() -> None:
    with pytest.raises(DataError, match="too short"):
        data.TokenWindows(corpus_of(8), 64)
    with pytest.raises(DataError, match="fewer than a global batch"):
        data.SampleLoader(data.TokenWindows(corpus_of(100), 4), global_batch=1000, seed=0)


def test_a_position_in_other_data_is_refused() -> None:
    loader = data.SampleLoader(data.TokenWindows(corpus_of(500), 4), global_batch=4, seed=0)
    others = {
        "content": data.SampleLoader(data.TokenWindows(corpus_of(501), 4), global_batch=4, seed=0),
        "number of samples": data.SampleLoader(data.TokenWindows(corpus_of(500), 5), global_batch=4, seed=0),
        "seed": data.SampleLoader(data.TokenWindows(corpus_of(500), 4), global_batch=4, seed=1),
    }
    for what, other in others.items():
        with pytest.raises(DataError, match=what):
            other.set_state(loader.get_state())
    with pytest.raises(DataError, match="without"):
        loader.set_state({"position": 3})


def test_digits_are_split_and_scaled() -> None:
    train, validation = data.Digits(), data.Digits(split="validation")
    assert train.num_samples + validation.num_samples == 1797
    assert set(train._members).isdisjoint(validation._members)
    batch = train.read(np.arange(5), np.zeros(5, np.int64))
    assert batch["images"].shape == (5, 8, 8, 1)
    assert batch["images"].min() >= 0
    assert batch["images"].max() <= 1
    assert batch["labels"].dtype == np.int32


def test_validation_ends_with_a_ragged_batch() -> None:
    source = data.Digits(split="validation")
    batches = list(data.EvalBatches(source, global_batch=100))
    assert [len(batch["labels"]) for batch in batches] == [100, 100, 100, source.num_samples - 300]
    assert len(list(data.EvalBatches(source, global_batch=100, num_batches=2))) == 2


def test_a_list_of_batches_resumes_by_its_number() -> None:
    loader = data.as_loader([{"x": 0}, {"x": 1}, {"x": 2}])
    assert [next(loader)["x"] for _ in range(4)] == [0, 1, 2, 0]
    again = data.as_loader([{"x": 0}, {"x": 1}, {"x": 2}])
    again.set_state(loader.get_state())
    assert next(again)["x"] == 1
    with pytest.raises(DataError, match="empty"):
        data.as_loader([])


@pytest.mark.parametrize("kind", ["dataset", "data loader"])
def test_grain_iterators_pass_their_position_through(kind: str) -> None:
    def make() -> data.Loader:
        numbers = grain.MapDataset.range(100).shuffle(seed=3).batch(4)
        if kind == "dataset":
            return data.as_loader(iter(numbers.to_iter_dataset()))
        sampler = grain.IndexSampler(100, shard_options=grain.NoSharding(), shuffle=True, seed=1, num_epochs=1)
        source = grain.RangeDataSource(0, 100, 1)
        return data.as_loader(iter(grain.DataLoader(data_source=source, sampler=sampler)))

    loader = make()
    for _ in range(3):
        next(loader)
    state = json.loads(json.dumps(loader.get_state()))
    expected = [np.asarray(next(loader)).tolist() for _ in range(4)]
    again = make()
    again.set_state(state)
    assert [np.asarray(next(again)).tolist() for _ in range(4)] == expected


def test_a_generator_trains_but_refuses_to_resume() -> None:
    loader = data.as_loader({"x": i} for i in range(5))
    next(loader)
    fresh = data.as_loader({"x": i} for i in range(5))
    with pytest.raises(DataError, match="cannot be resumed"):
        fresh.set_state(loader.get_state())
    with pytest.raises(DataError, match="no batch"):
        next(data.as_loader(iter(())))
    with pytest.raises(DataError, match="iterable"):
        data.as_loader(3)


def test_planning_shapes_hold_no_data() -> None:
    loader = data.SampleLoader(data.Shapes(), global_batch=256, seed=0)
    with pytest.raises(DataError, match="planning"):
        next(loader)
