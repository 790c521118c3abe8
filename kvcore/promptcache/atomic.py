"""Writing a file so that a crash or a full disk leaves either the old one or the new one."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable
from pathlib import Path

from kvcore.errors import InputError, KvcoreError


def check_target(path: Path) -> None:
    """InputError where no file can be written at ``path``: before the work that it is to hold."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"cannot write {path}: no permission to write into {path.parent}")


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """``write`` fills a temporary file in the same folder, which takes the place of ``path`` once it is on the disk.

    KvcoreError where that fails; then what was at ``path`` is still there. What killed writers of the same file left
    behind goes away.
    """
    target = Path(os.path.realpath(path))  # of a link, the file that it points to
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        _clear(target)
        write(temporary)
        _sync(temporary)
        os.replace(temporary, target)
        _sync(target.parent)
    except OSError as error:
        raise KvcoreError(f"cannot write {path}: {error.strerror or error}; what was there is unchanged") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _clear(target: Path) -> None:
    """Remove temporary files of ``target`` whose writers do not live any more, and an old one of this process."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        pid = left.name.removeprefix(f".{target.name}.").removesuffix(".tmp")
        if pid.isdecimal() and (int(pid) == os.getpid() or not _lives(int(pid))):
            with contextlib.suppress(OSError):
                left.unlink()


def _lives(pid: int) -> bool:
    """Whether such a process is here; on Windows, where asking would end it, every process counts as alive."""
    if os.name == "nt":
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True  # somebody else's
    return True


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
