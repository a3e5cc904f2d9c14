"""The metadata file beside a model: whole or not at all, and refused by its name."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from mlx_kvcache import read_metadata, write_metadata
from mlx_kvcache.errors import KVCacheError, MetadataError, ModelNotFoundError
from mlx_kvcache.facts.geometry import CacheGeometry
from mlx_kvcache.facts.metadata_file import METADATA_FILE
from tests.support.described_geometry import GEOMETRY, metadata


def test_the_file_lies_beside_the_model_and_reads_by_directory_or_by_name(tmp_path: Path) -> None:
    file = write_metadata(GEOMETRY, tmp_path)
    assert file == tmp_path / METADATA_FILE == tmp_path / "kv_cache.json"
    assert json.loads(file.read_text()) == metadata()
    renamed = tmp_path / "other.json"
    renamed.write_bytes(file.read_bytes())
    for path in (tmp_path, str(tmp_path), file, str(file), renamed):
        assert read_metadata(path) == GEOMETRY
    assert [each.name for each in tmp_path.iterdir()].count(METADATA_FILE) == 1
    # Readable by whoever may read the other files of the model.
    (tmp_path / "config.json").write_text("{}")
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(
        (tmp_path / "config.json").stat().st_mode
    )


def test_writing_again_replaces_the_file(tmp_path: Path) -> None:
    write_metadata(GEOMETRY, tmp_path)
    other = GEOMETRY.with_windows([7])
    write_metadata(other, tmp_path)
    assert read_metadata(tmp_path) == other != GEOMETRY
    assert [each.name for each in tmp_path.iterdir()] == [METADATA_FILE]


def test_a_link_is_replaced_and_what_it_pointed_to_kept(tmp_path: Path) -> None:
    """The hub's snapshots are links into a store of blobs that other snapshots share."""
    blob = tmp_path / "blob"
    blob.write_text("another model's")
    (tmp_path / METADATA_FILE).symlink_to(blob)
    write_metadata(GEOMETRY, tmp_path)
    assert blob.read_text() == "another model's"
    assert read_metadata(tmp_path) == GEOMETRY


@pytest.mark.parametrize("function", ["replace", "fsync"])
def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_metadata(GEOMETRY, tmp_path)
    before = (tmp_path / METADATA_FILE).read_bytes()

    def full(*_: object) -> None:
        assert len(list(tmp_path.iterdir())) == 2
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, function, full)
    with pytest.raises(MetadataError, match=r"kv_cache.json cannot be written: .*No space left"):
        write_metadata(GEOMETRY.with_windows([7]), tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [METADATA_FILE]
    assert (tmp_path / METADATA_FILE).read_bytes() == before


def test_a_geometry_that_is_refused_touches_no_file(tmp_path: Path) -> None:
    for thing in (None, metadata(), GEOMETRY.layers):
        with pytest.raises(MetadataError, match="a CacheGeometry is needed"):
            write_metadata(thing, tmp_path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_reader_beside_a_writer_sees_one_whole_file_or_the_other(tmp_path: Path) -> None:
    small, large = GEOMETRY, CacheGeometry(GEOMETRY.layers * 200)
    write_metadata(small, tmp_path)
    done = threading.Event()
    seen: list[CacheGeometry] = []
    failures: list[Exception] = []

    def reader() -> None:
        while not done.is_set():
            try:
                seen.append(read_metadata(tmp_path))
            except KVCacheError as error:
                failures.append(error)

    thread = threading.Thread(target=reader)
    thread.start()
    for number in range(60):
        write_metadata(large if number % 2 == 0 else small, tmp_path)
    done.set()
    thread.join()
    assert failures == []
    assert set(seen) <= {small, large}
    assert len(seen) > 1


def test_a_missing_file_or_directory_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "kv_cache.json", tmp_path / "nowhere"):
        with pytest.raises(ModelNotFoundError, match="there is no cache metadata at") as caught:
            read_metadata(path)
        assert isinstance(caught.value, FileNotFoundError)
        assert str(tmp_path) in str(caught.value)
    for path in (tmp_path / "nowhere", write_metadata(GEOMETRY, tmp_path)):
        with pytest.raises(ModelNotFoundError, match="there is no directory"):
            write_metadata(GEOMETRY, path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as JSON"),
        (b'{"version": 1', "cannot be read as JSON"),
        (b"\xff\xfe\x00", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"[]", "a mapping of fields"),
        (b"{}", "lacks version"),
        (b'{"version": NaN}', "version nan cannot be read"),
        (b'{"version": 1}', "lacks n_caches"),
    ],
)
def test_a_damaged_file_is_refused_by_its_name(
    content: bytes, message: str, tmp_path: Path
) -> None:
    file = tmp_path / METADATA_FILE
    file.write_bytes(content)
    with pytest.raises(MetadataError, match=message) as caught:
        read_metadata(tmp_path)
    assert str(file) in str(caught.value)
    assert ("as JSON" in str(caught.value)) == ("as JSON" in message)
