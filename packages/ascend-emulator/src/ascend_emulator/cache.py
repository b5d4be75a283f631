# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Directory of compiled libraries: its path, its owner and mode, and its locks.

What is in it runs in each process that uses the emulator. So it is created for its user only, and
files that another user can replace are refused, as by OpenSSH (``StrictModes`` of sshd_config(5)).
"""

from __future__ import annotations

import fcntl
import grp
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "ASCEND_EMULATOR_CACHE"
FIX = f"fix: set {VARIABLE} to a directory of your own"
LOCK_SECONDS = 3600.0  # A compilation takes minutes on slow machines.


class BuildError(RuntimeError):
    """The libraries cannot be built or used; the message is one line with what to do."""


def say_on_stderr(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def root() -> Path:
    """``ASCEND_EMULATOR_CACHE``, else ``ascend-emulator`` in the user's cache directory; absolute,
    without symbolic links.

    Raises:
        BuildError: there is no home directory.
    """
    chosen, caches = os.environ.get(VARIABLE), os.environ.get("XDG_CACHE_HOME")
    try:
        path = Path(chosen or caches or "~/.cache").expanduser()
    except RuntimeError:
        raise BuildError(
            f"ascend-emulator: this user has no home directory for the compiled libraries; {FIX}"
        ) from None
    return Path(os.path.realpath(path if chosen else path / "ascend-emulator"))


def _refuse_foreign(path: Path, *, above: bool = False) -> None:
    """Refuse a file or directory that another user can change. `above`: a directory above that
    of the cache."""
    status = path.lstat()
    problem = ""
    # The owner of / can replace every program; in a user namespace it is not 0.
    if status.st_uid not in (0, os.geteuid(), os.lstat("/").st_uid):
        problem = f"belongs to user {status.st_uid}"
    elif stat.S_ISLNK(status.st_mode) or (above and status.st_mode & stat.S_ISVTX):
        # A link has no mode of its own. In a sticky directory such as /tmp other users cannot
        # replace files that are not theirs.
        return
    elif status.st_mode & stat.S_IWOTH or (
        status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid)
    ):
        problem = f"has mode {stat.S_IMODE(status.st_mode):04o}"
    if problem:
        raise BuildError(
            f"ascend-emulator: {path} {problem}, so that others can replace the compiled libraries;"
            f" {FIX}"
        )


def _is_private(group: int) -> bool:
    """Whether a group belongs to root or to this user only: with the user's number, and without
    members."""
    try:
        return group == 0 or (group == os.geteuid() and not grp.getgrgid(group).gr_mem)
    except KeyError:
        return True  # has no entry, hence no members


def check(path: Path) -> None:
    """Check that no other user can replace a file or directory of the cache, or what is in the
    directory.

    Raises:
        BuildError: another user can, or this one cannot read it.
    """
    path = Path(os.path.realpath(path))
    try:
        for each in path.parents:
            _refuse_foreign(each, above=True)
        for each in (path, *path.rglob("*")):
            _refuse_foreign(each)
    except OSError as error:
        raise unusable(error, path) from None


def unusable(error: OSError, path: Path) -> BuildError:
    """The error of a file or directory that this user cannot read or write."""
    return BuildError(
        f"ascend-emulator: cannot use {error.filename or path}: {error.strerror}; {FIX}"
    )


def complete(directory: Path, name: str) -> bool:
    """Whether a directory has a file, with which its creation ended, and only this user or root can
    change it.

    Raises:
        BuildError: another user can change it, or this one cannot read it.
    """
    try:
        (directory / name).lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise unusable(error, directory) from None
    check(directory)
    return True


def create(directory: Path) -> None:
    """Create a directory and its parents, where missing, for this user only.

    Raises:
        BuildError: it cannot be created, or another user can change it.
    """
    try:
        for each in reversed((directory, *directory.parents)):
            if not each.exists():
                each.mkdir(mode=0o700, exist_ok=True)
        real = Path(os.path.realpath(directory))
        for each in (real, *real.parents):
            _refuse_foreign(each, above=True)
    except OSError as error:
        raise unusable(error, directory) from None


def protect(directory: Path) -> None:
    """Let only this user change what is in a directory, whatever the umask."""
    for each in (directory, *directory.rglob("*")):
        if not each.is_symlink():
            each.chmod(stat.S_IMODE(each.stat().st_mode) & ~0o022)


@contextmanager
def lock(path: Path, say: Callable[[str], None] = say_on_stderr) -> Iterator[None]:
    """Hold a file's lock, one process at a time.

    Raises:
        BuildError: the file cannot be used, or another process holds it for LOCK_SECONDS.
    """
    create(path.parent)
    try:  # Do not follow a symbolic link: its target would be created.
        file = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600
        )
    except OSError as error:
        raise unusable(error, path) from None
    try:
        _refuse_foreign(path)
        deadline, waits = time.monotonic() + LOCK_SECONDS, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waits:
                    say(f"ascend-emulator: waiting for another process, which holds {path} ...")
                waits = True
            if time.monotonic() > deadline:
                raise BuildError(
                    f"ascend-emulator: another process holds {path} for {LOCK_SECONDS:.0f} s; fix:"
                    f" end it (fuser {path})"
                )
            time.sleep(0.1)
        yield
    finally:
        os.close(file)
