"""The disk cache: entries of bytes under keys, in a folder of the user's own.

It keeps compiled kernels, and what was measured of machines, of which there is little.

What is loaded from here runs on the GPU with the rights of the user, so an entry counts only if
nobody else can have written it: the folder belongs to the user, is closed to all others and is no
symbolic link, and every file is opened relative to the folder that was looked at. An entry carries
a checksum and its own key; what is damaged is removed, and compiled anew by the caller. Entries are
written under a name that nobody else has and then renamed, so that readers and other writers see a
whole one or none.
"""

import contextlib
import errno
import hashlib
import os
import re
import stat
import time
import warnings
from collections.abc import Iterable, Iterator

# Both bound the folder: the second what it takes to look through it.
MOST_BYTES = 256 << 20
MOST_ENTRIES = 2048
# What a writer that died has left behind goes after an hour.
STALE_SECONDS = 3600

# What an entry is, and how its name ends.
KERNELS, CALIBRATION = "kernels", "calibration"

_MAGIC = b"gpuops cache 1\n"
_ENTRY = re.compile(r"[0-9a-f]{64}\.kernels")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")

_warned: set[str] = set()


class _UnusableError(Exception):
    """Why there is no cache, in words."""


def key_of(parts: Iterable[bytes]) -> str:
    """Return the key of an entry that depends on all of `parts`, and on their order."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def load(key: str, kind: str = KERNELS) -> bytes | None:
    """Return what was stored under `key`, or None."""
    try:
        with _folder() as folder:
            return None if folder is None else _read(folder, _name(key, kind), key)
    except _UnusableError as error:
        _warn(error)
        return None


def store(key: str, data: bytes, kind: str = KERNELS) -> None:
    """Store `data` under `key`, and drop what was not used for longest where that is too much."""
    entry = _sealed(key, data)
    if len(entry) > MOST_BYTES // 4:
        return
    try:
        with _folder() as folder:
            if folder is not None:
                _write(folder, _name(key, kind), entry)
                _evict(folder)
    except _UnusableError as error:
        _warn(error)


def _path() -> str | None:
    """Return where the cache is, by the environment as it is now; None where it is turned off."""
    path = os.environ.get("GPUOPS_CACHE_DIR")
    if path is not None:
        try:
            return os.path.abspath(path) if path else None
        except OSError as error:  # of the current folder, which may be gone
            raise _UnusableError(f"GPUOPS_CACHE_DIR={path}: {error.strerror}") from error
    # The XDG specification has paths that are relative ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            raise _UnusableError("the user has no home folder")
        base = os.path.join(home, ".cache")
    return os.path.join(base, "gpuops")


@contextlib.contextmanager
def _folder() -> Iterator[int | None]:
    """Open the folder of the cache, making it where it is missing, if it is safe to use."""
    path = _path()
    if path is None:
        yield None
        return
    try:
        with contextlib.suppress(FileExistsError):
            os.makedirs(path, 0o700)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _check(folder, path)
            yield folder
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise _UnusableError(f"{path} is no folder, or a symbolic link") from None
        raise _UnusableError(f"{path}: {error.strerror}") from error


def _check(folder: int, path: str) -> None:
    found = os.fstat(folder)
    if found.st_uid != os.geteuid():
        raise _UnusableError(f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise _UnusableError(
            f"{path} is open to other users (mode {mode:o}): `chmod 700` closes it"
        )


def _name(key: str, kind: str) -> str:
    return f"{key}.{kind}"


def _sealed(key: str, data: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(key.encode() + data).digest() + data


def _read(folder: int, name: str, key: str) -> bytes | None:
    # Whatever stands there under this name, neither a link nor a pipe is followed or waited for.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        # Where the process lacks something, the entry is not to blame.
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            _remove(folder, name)
        return None
    try:
        entry = _contents(file)
        data = entry[len(_MAGIC) + hashlib.sha256().digest_size :]
        if entry != _sealed(key, data):
            _remove(folder, name)
            return None
        # The time of the last use, by which entries are dropped. A file system that may only be
        # read still serves what it has.
        with contextlib.suppress(OSError):
            os.utime(file)
        return data
    finally:
        os.close(file)


def _contents(file: int) -> bytes:
    """Read a file of the user's own; anything else has no contents."""
    found = os.fstat(file)
    is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    if not is_ours or found.st_size > MOST_BYTES:
        return b""
    with open(file, "rb", closefd=False) as stream:
        return stream.read()


def _write(folder: int, name: str, entry: bytes) -> None:
    temporary = f".{name.partition('.')[0]}.{os.urandom(8).hex()}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        with open(file, "wb") as stream:
            stream.write(entry)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        _remove(folder, temporary)
        raise


def _remove(folder: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)


def _evict(folder: int) -> None:
    """Remove the entries that were used longest ago, down to three quarters of the bounds.

    Only files with the names of entries are touched: the folder may hold others'.
    """
    entries = []
    with os.scandir(folder) as files:
        for file in files:
            is_temporary = _TEMPORARY.fullmatch(file.name)
            if not is_temporary and not _ENTRY.fullmatch(file.name):
                continue
            try:
                found = file.stat(follow_symlinks=False)
            except FileNotFoundError:  # somebody else has removed it
                continue
            if not is_temporary:
                entries.append((found.st_mtime_ns, found.st_size, file.name))
            elif time.time() - found.st_mtime > STALE_SECONDS:
                _remove(folder, file.name)
    bytes_left, count_left = sum(size for _, size, _ in entries), len(entries)
    if bytes_left <= MOST_BYTES and count_left <= MOST_ENTRIES:
        return
    for _, size, name in sorted(entries):
        if bytes_left <= MOST_BYTES * 3 // 4 and count_left <= MOST_ENTRIES * 3 // 4:
            break
        _remove(folder, name)
        bytes_left -= size
        count_left -= 1


def _warn(error: _UnusableError) -> None:
    """Say once why there is no cache; the call that it is about goes on without."""
    text = (
        f"compiled kernels and measurements are not kept on disk: {error}. Set GPUOPS_CACHE_DIR to "
        "a folder of your own, or to nothing, which turns the cache off"
    )
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
