# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The directory of compiled libraries: whose files are used, what is created in it, and
its locks."""

import fcntl
import os
import pwd
import shutil
import stat
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import pytest
from ascend_emulator import build, cache

STRANGER = 23456
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")


@pytest.fixture
def shared():
    """A directory that all users can enter, which tmp_path is not."""
    directory = Path(tempfile.mkdtemp(prefix="ascend-emulator-shared-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def compiled(shared):
    """A cache in `shared` that looks as if the libraries had been compiled: a program that trusts
    it loads them."""
    target = shared / "cache" / build.library_dir().name
    target.mkdir(parents=True)
    (target / "libascendcl.so").write_text("what a stranger compiled")
    (target / "complete").touch()
    return target


def give(path, user):
    for each in (path, *path.rglob("*")):
        os.chown(each, user, user, follow_symlinks=False)


def as_stranger(body):
    """The text that `body` returns in a process of another user; an error is that text."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            message = body()
        except cache.BuildError as error:
            message = str(error)
        except BaseException:
            message = traceback.format_exc()
        os.write(writer, message.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        message = pipe.read()
    os.waitpid(child, 0)
    return message


def build_in(run, directory):
    return run("build", ASCEND_EMULATOR_CACHE=str(directory))


@as_root
def test_libraries_that_another_user_compiled_are_not_loaded(run, compiled, shared):
    give(shared / "cache", STRANGER)
    done = build_in(run, shared / "cache")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f"ascend-emulator: {shared / 'cache'} belongs to user {STRANGER}, so that others can"
        " replace the compiled libraries; fix: set ASCEND_EMULATOR_CACHE to a directory of"
        " your own"
    ]


@as_root
def test_one_library_of_another_user_is_enough(run, compiled, shared):
    give(compiled / "libascendcl.so", STRANGER)
    done = build_in(run, shared / "cache")
    assert done.returncode == 1
    assert (
        f"{compiled / 'libascendcl.so'} belongs to user {STRANGER}, so that others" in done.stderr
    )


@as_root
def test_cache_of_root_is_read_only_for_other_users(compiled, shared):
    def use():
        assert cache.complete(compiled, "complete")
        with cache.lock(compiled.with_suffix(".lock")):
            return "locked"

    assert (
        as_stranger(use)
        == f"ascend-emulator: cannot use {compiled.with_suffix('.lock')}: Permission denied; "
        "fix: set ASCEND_EMULATOR_CACHE to a directory of your own"
    )
    compiled.chmod(0o700)
    assert (
        f"cannot use {compiled / 'complete'}: Permission denied; fix: set ASCEND_EMULATOR_CACHE"
        in as_stranger(use)
    )


@pytest.mark.parametrize("place", ["cache", "target", "library"])
@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_libraries_that_others_may_replace_are_not_loaded(run, compiled, shared, place, mode):
    path = {"cache": compiled.parent, "target": compiled, "library": compiled / "libascendcl.so"}[
        place
    ]
    if mode == 0o775:
        if os.geteuid() != 0:
            pytest.skip("only root can give a file to another group")
        os.chown(path, -1, STRANGER)
    path.chmod(mode)
    done = build_in(run, shared / "cache")
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        f"ascend-emulator: {path} has mode {mode:04o}, so that others can replace the compiled"
        " libraries; fix: " in done.stderr
    )
    path.chmod(0o755)
    assert build_in(run, shared / "cache").stdout == f"{compiled}\n"


def test_foreign_cache_in_a_shared_directory_is_refused(run, compiled, shared):
    shared.chmod(0o1777)  # Like /tmp: other users cannot replace this user's directories.
    assert build_in(run, shared / "cache").returncode == 0
    shared.chmod(0o777)
    assert f"{shared} has mode 0777, so that others" in build_in(run, shared / "cache").stderr


@as_root
def test_primary_group_may_have_write_permission(shared):
    """A umask of 002 is usual where each user has a group of the same number."""
    target = shared / "cache"
    target.mkdir()
    (target / "complete").touch()
    give(target, STRANGER)
    target.chmod(0o775)
    assert as_stranger(lambda: str(cache.complete(target, "complete"))) == "True"


def test_created_files_are_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        with cache.lock(tmp_path / "a" / "b" / "digest.lock"):
            pass
        (tmp_path / "a" / "b" / "library.so").touch()
        cache.protect(tmp_path / "a")
    finally:
        os.umask(before)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in (tmp_path / "a", *(tmp_path / "a").rglob("*"))
    }
    assert modes == {"a": 0o700, "b": 0o700, "digest.lock": 0o600, "library.so": 0o644}


def test_a_lock_does_not_follow_a_link(run, compiled, shared, tmp_path):
    """Somebody who can create files beside the cache's would otherwise have this user's files
    emptied."""
    (compiled / "complete").unlink()
    compiler = tmp_path / "fails"  # The libraries' name has the compiler's version.
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec {build.cxx()[0][0]} --version\nexit 1\n'
    )
    compiler.chmod(0o755)
    victim = tmp_path / "notes"
    victim.write_text("not to be lost")
    lock = compiled.with_suffix(".lock")
    lock.symlink_to(victim)
    done = run("build", ASCEND_EMULATOR_CACHE=str(shared / "cache"), CXX=str(compiler))
    assert done.returncode == 1
    assert (
        f"cannot use {lock}: Too many levels of symbolic links; fix: set ASCEND_EMULATOR_CACHE"
        in done.stderr
    )
    assert victim.read_text() == "not to be lost"


def test_a_lock_that_another_process_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.3)
    path, messages = tmp_path / "digest.lock", []
    with open(path, "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with (
            pytest.raises(
                cache.BuildError, match=f"another process holds {path} for 0 s; fix: end it"
            ),
            cache.lock(path, messages.append),
        ):
            pass
        assert messages == [f"ascend-emulator: waiting for another process, which holds {path} ..."]
        monkeypatch.undo()
        threading.Timer(0.3, fcntl.flock, (holder, fcntl.LOCK_UN)).start()
        with cache.lock(path, messages.append):
            assert len(messages) == 2


def test_a_relative_cache_is_found_from_another_directory(run, compiled, shared, monkeypatch):
    monkeypatch.chdir(shared)
    show = "cd / && echo $LD_LIBRARY_PATH"
    done = run("run", "--", "sh", "-c", show, ASCEND_EMULATOR_CACHE="cache")
    assert done.stdout.split(":")[0].strip() == str(compiled)


@pytest.mark.parametrize("named", [False, True])
def test_a_user_without_home_directory(monkeypatch, tmp_path, named):
    def nobody(user):
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "XDG_CACHE_HOME", "ASCEND_EMULATOR_CACHE"):
        monkeypatch.delenv(name, raising=False)
    if named:
        monkeypatch.setenv("ASCEND_EMULATOR_CACHE", str(tmp_path))
        assert cache.root() == tmp_path.resolve()
        return
    with pytest.raises(
        cache.BuildError,
        match="no home directory for the compiled libraries; fix: set ASCEND_EMULATOR_CACHE",
    ):
        cache.root()


def test_a_home_directory_that_cannot_be_written(run):
    done = run(
        "run",
        "--",
        sys.executable,
        "-c",
        "pass",
        HOME="/proc/nothing",
        XDG_CACHE_HOME="",
        ASCEND_EMULATOR_CACHE="",
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "ascend-emulator: cannot use /proc/nothing: No such file or directory; "
        "fix: set ASCEND_EMULATOR_CACHE to a directory of your own"
    ]
