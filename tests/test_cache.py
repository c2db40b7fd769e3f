"""The disk cache: what it keeps, whom it trusts, and what it does about damage."""

import errno
import os
import stat
import threading
import time
import warnings
from pathlib import Path

import pytest
from helpers import run_child

from gpuops import _cache

KEY = _cache.key_of([b"one"])
OTHER = _cache.key_of([b"two"])


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    monkeypatch.setenv("GPUOPS_CACHE_DIR", str(path))
    monkeypatch.setattr(_cache, "_warned", set())
    return path


def entry_of(folder, key=KEY):
    (path,) = folder.glob(f"{key}*")
    return path


def mode_of(path):
    return stat.S_IMODE(path.lstat().st_mode)


def key_number(number):
    return _cache.key_of([number.to_bytes(4, "little")])


def test_what_is_stored_comes_back(folder):
    assert _cache.load(KEY) is None
    _cache.store(KEY, b"data")
    assert _cache.load(KEY) == b"data"
    assert _cache.load(OTHER) is None
    _cache.store(KEY, b"")
    assert _cache.load(KEY) == b""
    assert mode_of(folder) == 0o700
    assert mode_of(entry_of(folder)) == 0o600
    assert len(list(folder.iterdir())) == 1


def test_the_mode_of_the_folder_does_not_depend_on_the_umask(folder):
    before = os.umask(0)
    try:
        _cache.store(KEY, b"data")
    finally:
        os.umask(before)
    assert mode_of(folder) == 0o700
    assert mode_of(entry_of(folder)) == 0o600


def test_a_key_depends_on_every_part_and_on_their_borders():
    parts = [[b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"c", b"ab"], [b"abc", b""], []]
    assert len({_cache.key_of(part) for part in parts}) == len(parts)
    assert _cache.key_of([b"ab", b"c"]) == _cache.key_of(iter([b"ab", b"c"]))


# Where it is.


def test_an_empty_name_turns_it_off(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUOPS_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _cache.store(KEY, b"data")
    assert _cache.load(KEY) is None
    assert list(tmp_path.iterdir()) == []


def test_by_default_it_is_where_the_desktop_specification_has_caches(tmp_path, monkeypatch):
    monkeypatch.delenv("GPUOPS_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    _cache.store(KEY, b"data")
    assert entry_of(tmp_path / "xdg" / "gpuops").is_file()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    _cache.store(KEY, b"data")
    assert entry_of(tmp_path / "home" / ".cache" / "gpuops").is_file()
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert _cache.load(KEY) == b"data"


def test_without_a_home_it_says_so_and_goes_without(monkeypatch):
    monkeypatch.delenv("GPUOPS_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "nowhere")
    with pytest.warns(RuntimeWarning, match="the user has no home folder"):
        assert _cache.load(KEY) is None


# Whom it trusts.


def refused(match):
    """Loading warns and finds nothing; and nothing is said, and nothing done, a second time."""
    with pytest.warns(RuntimeWarning, match=match) as caught:
        assert _cache.load(KEY) is None
    assert "GPUOPS_CACHE_DIR" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _cache.store(KEY, b"data")
        assert _cache.load(KEY) is None


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o755, 0o701, 0o1777])
def test_a_folder_that_is_open_to_others_is_refused(folder, mode):
    _cache.store(KEY, b"data")
    folder.chmod(mode)
    refused(f"is open to other users .mode {mode:o}.: `chmod 700` closes it")
    assert mode_of(folder) == mode
    folder.chmod(0o700)
    assert _cache.load(KEY) == b"data"


def test_a_symbolic_link_is_refused(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    refused("is no folder, or a symbolic link")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_dangling_link_is_refused(folder, tmp_path):
    folder.symlink_to(tmp_path / "nowhere")
    refused("is no folder, or a symbolic link")
    assert not (tmp_path / "nowhere").exists()


def test_a_file_in_its_place_is_refused(folder):
    folder.write_bytes(b"a file")
    refused("is no folder")
    assert folder.read_bytes() == b"a file"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_a_folder_of_another_user_is_refused(folder):
    _cache.store(KEY, b"data")
    os.chown(folder, 4321, -1)
    refused("belongs to user 4321, not to 0")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_an_entry_of_another_user_is_refused(folder):
    _cache.store(KEY, b"data")
    os.chown(entry_of(folder), 4321, -1)
    assert _cache.load(KEY) is None


def test_a_folder_that_cannot_be_made_is_done_without(monkeypatch):
    monkeypatch.setenv("GPUOPS_CACHE_DIR", "/proc/gpuops")
    refused("No such file or directory|Permission denied|not permitted")


def test_a_full_disk_is_done_without(cpu_device, folder, tmp_path):
    run_child(
        cpu_device.gpuops,
        """
import os, resource, warnings
from gpuops import _cache
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
key = _cache.key_of([])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        _cache.store(key, bytes(100_000))
        assert _cache.load(key) is None
assert len(caught) == 1, caught
assert "not kept on disk" in str(caught[0].message)
_cache.store(key, b"small")
assert _cache.load(key) == b"small"
assert len(os.listdir(os.environ["GPUOPS_CACHE_DIR"])) == 1
""",
        GPUOPS_CACHE_DIR=str(folder),
        GCOV_PREFIX=str(tmp_path / "counts"),  # half of one would spoil what others have counted
    )


# Damage.


def test_a_damaged_entry_is_removed(folder):
    _cache.store(KEY, b"data")
    right = entry_of(folder).read_bytes()
    damaged = [right[:length] for length in range(len(right))]
    damaged += [
        right[:at] + bytes([right[at] ^ 1 << bit]) + right[at + 1 :]
        for at in range(len(right))
        for bit in (0, 7)
    ]
    damaged += [right + b"x", right + right, b"\0" * len(right)]
    for contents in damaged:
        path = folder / f"{KEY}.kernels"
        path.write_bytes(contents)
        assert _cache.load(KEY) is None
        assert not path.exists()
    _cache.store(KEY, b"data")
    assert _cache.load(KEY) == b"data"


def test_an_entry_under_the_name_of_another_is_removed(folder):
    _cache.store(KEY, b"data")
    entry_of(folder).rename(folder / f"{OTHER}.kernels")
    assert _cache.load(OTHER) is None
    assert list(folder.iterdir()) == []


def put_link(path):
    valid = path.with_name("valid")
    path.rename(valid)
    path.symlink_to(valid)


def put_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("put", [put_link, put_pipe])
def test_what_is_no_file_is_removed(folder, put):
    _cache.store(KEY, b"data")
    path = entry_of(folder)
    put(path)
    assert _cache.load(KEY) is None
    assert not os.path.lexists(path)
    _cache.store(KEY, b"data")
    assert _cache.load(KEY) == b"data"


def test_a_folder_in_the_place_of_an_entry_is_done_without(folder):
    _cache.store(OTHER, b"data")
    (folder / f"{KEY}.kernels").mkdir()
    assert _cache.load(KEY) is None
    with pytest.warns(RuntimeWarning, match="not kept on disk"):
        _cache.store(KEY, b"data")
    assert _cache.load(OTHER) == b"data"
    assert len(list(folder.iterdir())) == 2


def test_an_entry_outlives_a_lack_of_descriptors(folder, monkeypatch):
    _cache.store(KEY, b"data")
    real = os.open

    def without_descriptors(path, flags, *arguments, **keywords):
        if keywords.get("dir_fd") is not None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return real(path, flags, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", without_descriptors)
        assert _cache.load(KEY) is None
    assert _cache.load(KEY) == b"data"


def test_no_descriptor_is_left_open(folder):
    before = os.listdir("/proc/self/fd")
    test_what_is_stored_comes_back(folder)
    test_what_is_no_file_is_removed(folder, put_pipe)
    folder.chmod(0o755)
    refused("is open to other users")
    assert os.listdir("/proc/self/fd") == before


# Its size.


def touch(path, seconds_ago):
    then = time.time() - seconds_ago
    os.utime(path, (then, then), follow_symlinks=False)


def test_what_was_not_used_for_longest_goes(folder, monkeypatch):
    monkeypatch.setattr(_cache, "MOST_BYTES", 40_000)
    keys = [key_number(i) for i in range(8)]
    for i, key in enumerate(keys):
        _cache.store(key, bytes(4_000))
        touch(entry_of(folder, key), 1000 - i)
    assert _cache.load(keys[0]) is not None  # which is a use
    _cache.store(OTHER, bytes(9_000))
    left = [key for key in keys if _cache.load(key) is not None]
    assert left == [keys[0], *keys[4:]]
    assert _cache.load(OTHER) == bytes(9_000)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 30_000


def test_the_number_of_entries_is_bounded_too(folder, monkeypatch):
    monkeypatch.setattr(_cache, "MOST_ENTRIES", 20)
    for i in range(50):
        _cache.store(key_number(i), b"data")
        assert _cache.load(key_number(i)) == b"data"
        assert len(list(folder.iterdir())) <= 20


def test_a_very_large_entry_is_not_stored(folder, monkeypatch):
    monkeypatch.setattr(_cache, "MOST_BYTES", 40_000)
    _cache.store(KEY, bytes(4_000))
    _cache.store(OTHER, bytes(11_000))
    assert _cache.load(OTHER) is None
    assert _cache.load(KEY) is not None


def test_files_of_others_are_left_alone(folder, monkeypatch):
    monkeypatch.setattr(_cache, "MOST_ENTRIES", 2)
    _cache.store(KEY, b"data")
    others = [folder / name for name in ("notes.txt", f"{KEY}.kernels.bak", "x.kernels", ".tmp")]
    for path in others:
        path.write_bytes(bytes(100))
        touch(path, 10**7)
    (folder / "a folder").mkdir()
    for i in range(10):
        _cache.store(key_number(i), b"data")
    assert all(path.exists() for path in [*others, folder / "a folder"])
    assert len(list(folder.glob("*.kernels"))) <= 3


def test_what_a_writer_that_died_has_left_goes_after_a_while(folder):
    _cache.store(KEY, b"data")
    dead, alive = (folder / f".{KEY}.{digit * 16}.tmp" for digit in "01")
    for path in (dead, alive):
        path.write_bytes(b"half an ent")
    touch(dead, _cache.STALE_SECONDS + 60)
    _cache.store(OTHER, b"data")
    assert not dead.exists() and alive.exists()


# Many at once.

WRITER = """
import random, sys
from gpuops import _cache
_cache.MOST_BYTES = 200_000
random.seed(int(sys.argv[1]) if len(sys.argv) > 1 else None)
for turn in range(400):
    number = random.randrange(12)
    key, data = _cache.key_of([bytes([number])]), bytes([number]) * (1000 * number + turn % 2)
    found = _cache.load(key)
    assert found is None or found in (bytes([number]) * (1000 * number + i) for i in (0, 1))
    if turn % 3 == 0 or found is None:
        _cache.store(key, data)
"""


def test_processes_and_threads_at_once(cpu_device, folder):
    failures = []

    def run_writer():
        try:
            run_child(cpu_device.gpuops, WRITER, GPUOPS_CACHE_DIR=str(folder))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run_writer) for _ in range(4)]
    threads += [
        threading.Thread(target=lambda: [use_one_key(i, failures) for i in range(300)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert list(folder.glob(".*.tmp")) == []


def use_one_key(turn, failures):
    data = bytes([turn % 251]) * 5000
    _cache.store(KEY, data)
    found = _cache.load(KEY)
    if found is not None and (len(found) != 5000 or found != found[:1] * 5000):
        failures.append("an entry was mixed up")


def test_a_fork_goes_on_with_it(folder):
    _cache.store(KEY, b"data")
    child = os.fork()
    if child == 0:
        _cache.store(OTHER, b"of the child")
        os._exit(0 if _cache.load(KEY) == b"data" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert _cache.load(OTHER) == b"of the child"


def test_a_folder_that_may_only_be_read_still_serves(folder):
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    _cache.store(KEY, b"data")
    folder.chmod(0o500)
    assert _cache.load(KEY) == b"data"
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        _cache.store(OTHER, b"data")
    folder.chmod(0o700)


def test_paths_are_those_of_the_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUOPS_CACHE_DIR", "here")
    _cache.store(KEY, b"data")
    assert entry_of(Path("here")).is_file()


def test_the_current_folder_is_gone(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    monkeypatch.setenv("GPUOPS_CACHE_DIR", "here")
    with pytest.warns(RuntimeWarning, match="GPUOPS_CACHE_DIR=here: No such file"):
        _cache.store(KEY, b"data")
