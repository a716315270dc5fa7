"""The fsspec file system: its own calls, fsspec's abstract tests, and Parquet by pandas and pyarrow (`make python`)."""

import datetime
import errno
import os
import pickle
import signal
import subprocess
import sys

import fsspec
import pytest
from fsspec.tests import abstract

import braidfs
from braidfs.fsspec import BraidFileSystem


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("volume") / "vol.img"
    braidfs.format(path, 256 << 20)
    return str(path)


@pytest.fixture(scope="module")
def fs(image):
    fs = fsspec.filesystem("braidfs", volume=image)
    yield fs
    fs.close()


class Fixtures(abstract.AbstractFixtures):
    @pytest.fixture(scope="class")
    def fs(self):
        with braidfs.Volume.in_memory(256 << 20) as volume:
            yield BraidFileSystem(volume)

    @pytest.fixture
    def fs_path(self, fs):
        fs.makedirs("/top", exist_ok=True)
        yield "/top"
        fs.rm("/top", recursive=True)

    @pytest.fixture
    def supports_empty_directories(self):
        return True


class TestCopy(Fixtures, abstract.AbstractCopyTests):
    pass


class TestGet(Fixtures, abstract.AbstractGetTests):
    pass


class TestPut(Fixtures, abstract.AbstractPutTests):
    pass


class TestOpen(Fixtures, abstract.AbstractOpenTests):
    pass


class TestPipe(Fixtures, abstract.AbstractPipeTests):
    pass


def test_it_is_registered_and_one_per_volume(fs, image):
    assert isinstance(fs, BraidFileSystem)
    assert fsspec.filesystem("braidfs", volume=image) is fs
    again = BraidFileSystem(volume=image, auto_mkdir=False, skip_instance_cache=True)
    assert again is not fs and again.volume is fs.volume
    assert pickle.loads(pickle.dumps(fs)).volume is fs.volume
    with pytest.raises(ValueError):
        fsspec.filesystem("braidfs")


def test_paths():
    strip = BraidFileSystem._strip_protocol
    for path in ("braidfs://a/b", "braidfs:///a/b/", "a/b", "/a/b/"):
        assert strip(path) == "/a/b"
    assert strip("braidfs://") == "/" == strip("")
    assert BraidFileSystem._parent("/a") == "/" and BraidFileSystem._parent("a/b") == "/a"


def test_calls(fs):
    fs.pipe("/calls/deep/er/f", b"0123456789")
    assert fs.cat_file("/calls/deep/er/f", 2, 5) == b"234"
    assert fs.cat("braidfs://calls/deep/er/f") == b"0123456789"
    info = fs.info("/calls/deep/er/f")
    assert (info["name"], info["size"], info["type"]) == ("/calls/deep/er/f", 10, "file")
    assert fs.ls("/calls", detail=False) == ["/calls/deep"]
    assert fs.ls("/calls/deep/er/f", detail=False) == ["/calls/deep/er/f"]
    assert fs.find("/calls") == ["/calls/deep/er/f"]
    assert fs.glob("/calls/**/f") == ["/calls/deep/er/f"]
    assert fs.du("/calls") == 10
    now = datetime.datetime.now(datetime.timezone.utc)
    for time in (fs.created("/calls/deep/er/f"), fs.modified("/calls/deep/er/f")):
        assert abs((now - time).total_seconds()) < 3600
    fs.mv("/calls/deep", "/calls/moved", recursive=True)
    assert not fs.exists("/calls/deep") and fs.isfile("/calls/moved/er/f")
    with fs.open("/calls/moved/er/f", "ab") as f:
        f.write(b"ab")
    assert fs.tail("/calls/moved/er/f", 4) == b"89ab"
    fs.touch("/calls/moved/er/f", truncate=False)
    assert fs.size("/calls/moved/er/f") == 12
    fs.touch("/calls/moved/er/f")
    assert fs.size("/calls/moved/er/f") == 0
    fs.volume.symlink("er", "/calls/moved/link")
    fs.volume.symlink("nowhere", "/calls/moved/broken")
    assert fs.info("/calls/moved/link")["type"] == "directory" and fs.info("/calls/moved/broken")["type"] == "link"
    with pytest.raises(FileExistsError):
        fs.mkdir("/calls/moved")
    with pytest.raises(FileNotFoundError):
        fs.ls("/no")
    with pytest.raises(FileNotFoundError):
        fs.rm("/no")
    with pytest.raises(OSError):
        fs.rmdir("/calls")
    fs.rm("/calls/moved/link")
    assert fs.isdir("/calls/moved/er")
    fs.rm("/calls", recursive=True)
    assert not fs.exists("/calls")
    with pytest.raises(OSError):
        fs.rm("/", recursive=True)


def test_reads_from_the_end_and_blocks():
    with braidfs.Volume.in_memory(64 << 20) as volume:
        fs = BraidFileSystem(volume)
        data = b"".join(b"line %d\n" % n for n in range(1000))
        fs.pipe("/f", data)
        for start, end in (-10, None), (-20, -10), (5, -5), (None, -3), (3, 9), (0, None), (-(1 << 20), 4):
            assert fs.cat_file("/f", start, end) == data[start:end]
        assert fs.tail("/f", 7) == data[-7:]
        assert fs.read_block("/f", 0, 20) == data[:20] and fs.read_block("/f", 20, None) == data[20:]
        assert fs.read_block("/f", 10, 20, b"\n") == data[14:35]
        assert fs.cat_ranges(["/f", "/f"], [-4, 0], [None, 3]) == [data[-4:], data[:3]]


def test_a_close_writes_what_text_and_codecs_hold(tmp_path):
    image = os.fspath(tmp_path / "vol.img")
    braidfs.format(image, 64 << 20)
    fs = BraidFileSystem(volume=image, skip_instance_cache=True)
    files = [fs.open("/t", "w"), fs.open("/t.gz", "w", compression="gzip"), fs.open("/b.gz", "wb", compression="gzip")]
    for file in files:
        file.write(b"kept" if file is files[2] else "kept")
    fs.close()
    assert all(file.closed for file in files)
    assert fs.cat("/t") == b"kept"
    for name in "/t.gz", "/b.gz":
        with fs.open(name, "rb", compression="gzip") as file:
            assert file.read() == b"kept"
    fs.close()
    code = (
        "import sys; from braidfs.fsspec import BraidFileSystem\n"
        "f = BraidFileSystem(sys.argv[1]).open('/end', 'w'); f.write('kept')\n"
    )
    subprocess.run([sys.executable, "-c", code, image], check=True)
    assert fs.cat("/end") == b"kept"
    fs.close()


def test_lists_and_depths_are_removed():
    with braidfs.Volume.in_memory(64 << 20) as volume:
        fs = BraidFileSystem(volume)

        def fill():
            for name in "/d/f", "/d/sub/f", "/d/sub/deep/f", "/e/f":
                fs.pipe(name, b"1")

        fill()
        fs.rm(["/d", "/d/f", "/d/sub/deep", "/e"], recursive=True)
        assert fs.ls("/") == []
        fill()
        fs.rm(["/d/sub/deep", "/d/sub/deep/f", "/e", "/e/f"])
        assert fs.find("/") == ["/d/f", "/d/sub/f"]
        fill()
        fs.rm("/d/**", recursive=True)
        assert fs.find("/") == ["/e/f"]
        fill()
        fs.rm(["/d", "/e"], recursive=True, maxdepth=2)
        assert fs.find("/", withdirs=True) == ["/", "/d", "/d/sub", "/d/sub/deep", "/d/sub/deep/f"]
        with pytest.raises(OSError) as caught:
            fs.rm(["/", "/d"], recursive=True)
        assert caught.value.errno == errno.EBUSY and fs.exists("/d/sub/deep/f")


def test_text_and_compression(image, fs):
    with fsspec.open("braidfs://t.gz", "wt", compression="infer", encoding="utf-8", volume=image) as f:
        f.write("grüße\n" * 1000)
    with fsspec.open("braidfs://t.gz", "rt", compression="gzip", encoding="utf-8", volume=image) as f:
        assert f.read() == "grüße\n" * 1000
    assert fs.cat("/t.gz")[:2] == b"\x1f\x8b"


def test_a_transaction_is_all_or_nothing(fs):
    fs.pipe("/tx/old", b"old")
    with fs.transaction:
        with fs.open("/tx/old", "wb") as f:
            f.write(b"new")
        with fs.open("/tx/other", "wb") as f:
            f.write(b"other")
        assert fs.cat("/tx/old") == b"old" and not fs.exists("/tx/other")
    assert fs.cat("/tx/old") == b"new" and fs.cat("/tx/other") == b"other"
    with pytest.raises(RuntimeError), fs.transaction:
        with fs.open("/tx/old", "wb") as f:
            f.write(b"never")
        raise RuntimeError
    assert fs.cat("/tx/old") == b"new"
    assert sorted(fs.ls("/tx", detail=False)) == ["/tx/old", "/tx/other"]


def test_a_transaction_without_room_is_taken_back():
    with braidfs.Volume.in_memory(64 << 20) as volume:
        fs = BraidFileSystem(volume)
        with pytest.raises(OSError) as caught, fs.transaction:
            file = fs.open("/big", "wb")
            while True:
                # what the buffer holds then cannot be written by a close, either
                file.write(bytes(100_000))
        assert caught.value.errno == errno.ENOSPC
        assert fs.ls("/", detail=False) == []
        fs.pipe("/f", b"1")
        assert fs.cat("/f") == b"1"
        with pytest.raises(FileExistsError), fs.transaction:
            with fs.open("/new", "xb") as file:
                file.write(b"2")
            volume.write_bytes("new", b"3")
        assert sorted(fs.ls("/", detail=False)) == ["/f", "/new"]
        assert fs.cat("/new") == b"3"


def test_a_transaction_that_fails_ends():
    with braidfs.Volume.in_memory(64 << 20) as volume:
        fs = BraidFileSystem(volume)
        with pytest.raises(FileExistsError), fs.transaction:
            for name, mode in ("/first", "wb"), ("/second", "xb"), ("/third", "wb"):
                with fs.open(name, mode) as file:
                    file.write(b"by it")
            volume.write_bytes("second", b"others'")
        # the rest left nothing behind, and what comes later is written at once
        assert sorted(fs.ls("/", detail=False)) == ["/first", "/second"]
        assert fs.cat("/second") == b"others'"
        with fs.open("/later", "wb") as file:
            file.write(b"2")
        assert fs.cat("/later") == b"2"
        fs.start_transaction()
        with fs.open("/at the end", "wb") as file:
            file.write(b"3")
        fs.end_transaction()
        assert fs.cat("/at the end") == b"3"


def test_what_cannot_wait_is_refused_in_a_transaction():
    with braidfs.Volume.in_memory(64 << 20) as volume:
        fs = BraidFileSystem(volume)
        fs.pipe("/f", b"1")
        with fs.transaction:
            for name, mode in ("/new/a", "ab"), ("/f", "ab"), ("/f", "r+b"), ("/new/w", "w+b"), ("/new/x", "x+b"):
                with pytest.raises(NotImplementedError):
                    fs.open(name, mode)
            with pytest.raises(ValueError):
                fs.open("/new/q", "qb")
            with fs.open("/f", "rb") as file:
                assert file.read() == b"1"
        assert fs.ls("/", detail=False) == ["/f"] and fs.cat("/f") == b"1"
        with fs.open("/f", "r+b") as file:
            file.write(b"2")
        assert fs.cat("/f") == b"2"


def test_odd_symlinks_hide_nothing_and_circles_end():
    with braidfs.Volume.in_memory(64 << 20) as volume:
        fs = BraidFileSystem(volume)
        fs.pipe("/d/sub/f", b"12")
        targets = {"loop": "loop", "through": "sub/f/x", "nowhere": "none", "file": "sub/f", "dir": "sub"}
        # each way twice at every step: find would have 2^40 paths
        targets |= {"again": ".", "up": "../d"}
        for name, target in targets.items():
            volume.symlink(target, f"/d/{name}")
        types = {e["name"]: e["type"] for e in fs.ls("/d")}
        kinds = {"sub": "directory", "file": "file"} | dict.fromkeys(targets.keys() - {"file"}, "link")
        assert types == {f"/d/{name}": kind for name, kind in kinds.items()}
        assert all(e["islink"] and e["destination"] == targets[e["name"][3:]] for e in fs.ls("/d") if e["name"] != "/d/sub")
        assert fs.find("/d") == sorted([f"/d/{name}" for name in targets] + ["/d/sub/f"])
        assert fs.find("/d", withdirs=True, maxdepth=1) == sorted(["/d", "/d/sub"] + [f"/d/{name}" for name in targets])
        assert [sorted(files) for _, _, files in volume.walk("/d")] == [sorted(targets.keys() - {"dir", "again", "up"}), ["f"]]
        # by its name a link is what it leads to
        assert fs.info("/d/dir")["type"] == "directory" and fs.isdir("/d/dir") and fs.cat("/d/file") == b"12"
        assert fs.ls("/d/dir", detail=False) == ["/d/dir/f"] and fs.info("/d/file")["size"] == 2
        for name in "loop", "through", "nowhere":
            assert fs.info(f"/d/{name}")["type"] == "link"
            assert not fs.exists(f"/d/{name}") and not fs.isdir(f"/d/{name}") and volume.islink(f"/d/{name}")
            assert not fs.exists(f"/d/{name}/below")
        assert fs.du("/d") == 4
        fs.rm("/d", recursive=True)
        assert fs.ls("/") == []


def in_a_child(work):
    """Whether `work` is true in a child of a fork; it has a minute."""
    child = os.fork()
    if child == 0:
        ok = False
        try:
            signal.alarm(60)
            ok = work()
        finally:
            os._exit(not ok)
    return os.waitpid(child, 0)[1] == 0


def test_children_of_a_fork_open_the_volume_for_themselves(tmp_path):
    image = os.fspath(tmp_path / "vol.img")
    braidfs.format(image, 64 << 20)
    with braidfs.Volume(image) as volume:
        volume.write_bytes("f", b"1")
    fs = BraidFileSystem(volume=image, options="ro", skip_instance_cache=True)
    assert fs.cat("/f") == b"1"
    before = fs.volume
    listing = before.scandir("/")

    def work():
        with pytest.raises(OSError):
            list(listing)
        with pytest.raises(OSError):
            before.read_bytes("f")
        return before.closed and fs.cat("/f") == b"1" and fs.volume is not before and not fs.volume.closed

    # as another thread may
    with braidfs.fsspec._lock:
        assert in_a_child(work)
    assert fs.cat("/f") == b"1" and fs.volume is before
    fs.close()
    fs = BraidFileSystem(volume=image, skip_instance_cache=True)
    assert fs.cat("/f") == b"1"

    def refused():
        with pytest.raises(OSError) as caught:
            fs.cat("/f")
        return "in use" in str(caught.value)

    assert in_a_child(refused)
    fs.close()


def test_parquet_by_pandas(image):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    there = {"storage_options": {"volume": image}}
    rows = 200_000
    table = pandas.DataFrame(
        {
            "n": range(rows),
            "text": [f"row {i % 1000}" for i in range(rows)],
            "x": [i / 7 for i in range(rows)],
            "part": [i % 3 for i in range(rows)],
        }
    )
    table.to_parquet("braidfs://data/one.parquet", **there)
    pandas.testing.assert_frame_equal(pandas.read_parquet("braidfs://data/one.parquet", **there), table)
    some = pandas.read_parquet("braidfs://data/one.parquet", columns=["x"], filters=[("n", "<", 10)], **there)
    assert list(some["x"]) == list(table["x"][:10])
    table.to_parquet("braidfs://data/parts", partition_cols=["part"], **there)
    back = pandas.read_parquet("braidfs://data/parts", **there).sort_values("n", ignore_index=True)
    assert list(back["text"]) == list(table["text"])
    table.head(1000).to_csv("braidfs://data/t.csv.gz", index=False, **there)
    pandas.testing.assert_frame_equal(pandas.read_csv("braidfs://data/t.csv.gz", **there), table.head(1000))


def test_parquet_by_pyarrow_survives_a_close(image, fs):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.dataset as dataset
    import pyarrow.parquet as parquet

    table = pa.table({"n": pa.array(range(100_000)), "s": pa.array([str(i) for i in range(100_000)])})
    # absolute: pyarrow compares names with what it gave
    parquet.write_table(table, "/arrow/one.parquet", filesystem=fs)
    write = {"max_rows_per_file": 20_000, "max_rows_per_group": 20_000}
    dataset.write_dataset(table, "/arrow/many", format="parquet", filesystem=fs, **write)
    fs.close()
    with braidfs.Volume(image, "ro") as v:
        assert len(v.listdir("arrow/many")) == 5
        with v.open("arrow/one.parquet", "rb") as f:
            assert parquet.read_table(f).equals(table)
    back = dataset.dataset("/arrow/many", format="parquet", filesystem=fs).to_table().sort_by("n")
    assert back.equals(table)


def test_a_closed_volume_opens_again(tmp_path):
    image = os.fspath(tmp_path / "vol.img")
    braidfs.format(image, 64 << 20)
    first = fsspec.filesystem("braidfs", volume=image)
    first.pipe("/f", b"1")
    first.close()
    # by another, and by the one that fsspec keeps
    with braidfs.Volume(image) as v:
        assert v.read_bytes("f") == b"1"
    assert fsspec.filesystem("braidfs", volume=image).cat("/f") == b"1"
    first.close()


def test_volumes_in_memory_are_not_mixed_up():
    with braidfs.Volume.in_memory() as a, braidfs.Volume.in_memory() as b:
        BraidFileSystem(a).pipe("/f", b"a")
        assert not BraidFileSystem(b).exists("/f")
