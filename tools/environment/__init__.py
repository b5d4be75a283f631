# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The environment of this checkout, .venv: creates it, updates it, and does next to nothing when it
is up to date.

Standard library only, and any Python 3 that is still supported: it runs before there is an
environment. The tools call `enter()`. What it does, in this order, each step only when its inputs
have changed:

1. finds uv on PATH, or installs it with pip into .uv;
2. creates .venv unless this checkout has one, and installs what differs from
   tools/environment/requirements.txt, building vLLM without compiled kernels;
3. installs the packages of the workspace in editable form;
4. compiles the emulator (`ascend-emulator build`), which a new .venv begins as soon as torch and
   torch-npu are installed.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "ready.json"
PRIVATE_UV = ROOT / ".uv"
REQUIREMENTS = HERE / "requirements.txt"
EXCLUDED = HERE / "excluded.txt"
UV_VERSION = (0, 13, 8)

# uv's names for pip's settings of package sources.
PIP_TO_UV = {
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
}

# PyPI's torchvision for x86_64 is built for CUDA. Beside torch's CPU build its libraries cannot be
# loaded, and its import registers shapes for two of their operators. Users install the CPU build
# (docs/installation.md); tests need the Python code only.
TORCHVISION_OPERATORS = """import torch
if not hasattr(torch.ops.torchvision, "nms"):
    _operators = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

sys.path.append(str(ROOT))  # for harness.progress

_start = time.monotonic()


def enter() -> None:
    """Set up .venv and restart the calling script with its Python; the call returns in the
    restarted script.

    Exits with one line that says what to do when a step fails.
    """
    try:
        prepare()
    except KeyboardInterrupt:
        sys.exit("\nset-up: interrupted; start again to go on")
    if Path(sys.prefix).resolve() != VENV.resolve():
        sys.stdout.flush()
        os.execve(PYTHON, [str(PYTHON), *sys.argv], variables())


def variables() -> dict[str, str]:
    """Environment variables of an activated .venv."""
    path = f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**os.environ, "VIRTUAL_ENV": str(VENV), "PATH": path}


def prepare() -> None:
    """Bring .venv up to date with the checkout."""
    wanted = _wanted()
    if _done() == wanted:
        return
    PRIVATE_UV.mkdir(exist_ok=True)
    with open(PRIVATE_UV / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another set-up of this checkout")
            fcntl.flock(lock, fcntl.LOCK_EX)
        done = _done()
        steps = {
            "requirements": _install_requirements,
            "workspace": _install_workspace,
            "emulator": _compile_emulator,
        }
        for step, perform in steps.items():
            if done.get(step) == wanted[step]:
                continue
            if step == "requirements":  # The emulator is compiled for a version of torch.
                done = {"workspace": done["workspace"]} if _is_usable() else {}
            perform()
            done[step] = wanted[step]
            STAMP.write_text(json.dumps(done))
    size = subprocess.run(
        ["du", "-sm", str(VENV)], capture_output=True, text=True, check=False
    ).stdout.split()
    _say(f"ready; .venv takes {int(size[0]) / 1024:.1f} GB" if size else "ready")


def _wanted() -> dict[str, str]:
    """A hash of the inputs of each step. A moved checkout counts as changed: an environment
    contains its own path."""
    sources = (ROOT / "packages" / "ascend-emulator" / "src").rglob("*")
    return {
        "requirements": _hash([REQUIREMENTS], str(ROOT), TORCHVISION_OPERATORS, "no libraries"),
        "workspace": _hash(
            sorted([*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("packages/*/*.pth")])
        ),
        "emulator": _hash(
            sorted(path for path in sources if path.is_file() and "__pycache__" not in path.parts)
        ),
    }


def _hash(paths: list[Path], *texts: str) -> str:
    digest = hashlib.sha256(repr(texts).encode())
    for path in paths:
        digest.update(f"\0{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _done() -> dict[str, str]:
    """Hashes of the steps completed for .venv; empty if it is unusable."""
    if not PYTHON.exists():
        return {}
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


# The Python that runs this may be the environment's own, which is replaced together with its pip.
@functools.cache
def _pip_settings() -> dict[str, str]:
    """pip's settings under uv's names, where uv has none of its own: uv does not read pip's
    configuration."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    values: dict[str, tuple[int, str]] = {}
    for line in listing.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.strip().rpartition(".")
        rank = (
            ["global", "install", ":env:"].index(section)
            if section in ("global", "install", ":env:")
            else -1
        )
        if option in PIP_TO_UV and rank >= values.get(option, (0, ""))[0]:
            values[option] = (rank, ast.literal_eval(value.strip()))
    found = {}
    for option, (_, value) in values.items():
        name, separator = PIP_TO_UV[option]
        found[name] = separator.join(value.split())
    # pip selects the best version of all indexes, uv by default that of the first index that has
    # any.
    if "UV_INDEX" in found:
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {name: value for name, value in found.items() if name not in os.environ}


def find_uv() -> tuple[str, dict[str, str]]:
    """Path of a recent enough uv, which is installed if needed, and the environment variables to
    run it with."""
    settings = {**os.environ, **_pip_settings()}
    for candidate in (shutil.which("uv") or "uv", str(PRIVATE_UV / "bin" / "uv")):
        with contextlib.suppress(OSError):
            output = subprocess.run(
                [candidate, "--version"], capture_output=True, text=True, check=False
            ).stdout
            version = re.match(r"uv (\d+)\.(\d+)\.(\d+)", output)
            if version and tuple(map(int, version.groups())) >= UV_VERSION:
                return candidate, settings
    pinned = ".".join(map(str, UV_VERSION))
    _run(
        f"installing uv {pinned} into .uv",
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-qq",
            "--upgrade",
            "--target",
            PRIVATE_UV,
            f"uv=={pinned}",
        ],
        settings,
        f"install uv {pinned} or newer (https://docs.astral.sh/uv) or pip for {sys.executable},"
        " then start again",
    )
    return str(PRIVATE_UV / "bin" / "uv"), settings


def _is_usable() -> bool:
    """Whether .venv was completed in this checkout, so that only what differs is installed. What is
    no longer required stays in it."""
    activate = VENV / "bin" / "activate"
    return (
        _done().keys() >= {"requirements", "workspace"} and f"='{VENV}'\n" in activate.read_text()
    )


def _install_requirements() -> None:
    if not _is_usable():
        create(VENV)
        install(VENV, REQUIREMENTS, "installing torch and torch-npu", only=("torch", "torch-npu"))
        install_emulator_libs()
        _start_compiling_emulator()
    what = (
        "installing tools/environment/requirements.txt and building vLLM (downloads 0.6 GB, unless"
        " it is in uv's cache)"
    )
    install(VENV, REQUIREMENTS, what)


def create(venv: Path) -> None:
    """Create an empty environment, or replace an existing one, with this Python if it is supported,
    else with 3.11."""
    uv, settings = find_uv()
    running = (3, 11) <= sys.version_info[:2] <= (3, 13)
    python = getattr(sys, "_base_executable", sys.executable) if running else "3.11"
    _run(
        f"creating {venv.name}",
        [uv, "venv", "--quiet", "--clear", "--no-project", "--python", python, venv],
        settings,
        "install Python 3.11, 3.12 or 3.13, then start again",
    )


def install(venv: Path, requirements: Path, what: str, only: tuple[str, ...] = ()) -> None:
    """Install requirements that are complete: every dependency is listed, with its version. `only`
    names some of them."""
    uv, settings = find_uv()
    # torch's CPU build is what torch_npu is compiled against, and a tenth of the size of the CUDA
    # build, which is PyPI's default on Linux. A configured find-links location that has torch comes
    # first; else PyTorch's own CPU index.
    pins = {
        name: pin
        for pin, name in re.findall(r"^(([\w.-]+)==[\w.]+)", requirements.read_text(), re.MULTILINE)
    }
    # --no-deps, because the dependencies of some packages name what tools/environment/excluded.txt
    # leaves out. Bytecode is compiled here, once: with PYTHONDONTWRITEBYTECODE every process would
    # compile torch and vLLM again.
    options = [
        "--quiet",
        "--python",
        str(venv / "bin" / "python"),
        "--no-deps",
        "--compile-bytecode",
    ]
    is_local = _can_install(pins.get("torch", "torch"), venv / "bin" / "python", "--no-index")
    wanted = [pins[name] for name in only] or ["--requirement", requirements]
    _run(
        what,
        [
            uv,
            "pip",
            "install",
            *options,
            *([] if is_local else ["--torch-backend", "cpu"]),
            *wanted,
        ],
        settings,
        "check the network and the package indexes that pip and uv are configured with, then start"
        " again",
    )
    define_torchvision_operators(venv)


def define_torchvision_operators(venv: Path) -> None:
    """Let torchvision be imported beside torch's CPU build, whatever it was built for: without its
    libraries, which ascend-platform would refuse."""
    for library in venv.glob("lib/python*/site-packages/torchvision/*.so"):
        if b"libtorch_cuda.so" in library.read_bytes():
            library.unlink()
    for path in venv.glob("lib/python*/site-packages/torchvision/_meta_registrations.py"):
        text = path.read_text()
        if not text.startswith(TORCHVISION_OPERATORS):
            new = path.with_suffix(".new")  # Not in place: uv's cache has the same file.
            new.write_text(TORCHVISION_OPERATORS + text)
            new.replace(path)


def has_cpu_torch(version: str) -> bool:
    """Whether a find-links location or PyTorch's index has the CPU build of this torch."""
    torch = f"torch=={version}"
    return _can_install(torch, PYTHON, "--no-index") or _can_install(
        torch, PYTHON, "--torch-backend", "cpu"
    )


def _can_install(requirement: str, python: Path, *options: str) -> bool:
    uv, settings = find_uv()
    command = [
        uv,
        "pip",
        "install",
        "--dry-run",
        "--no-deps",
        "--python",
        str(python),
        *options,
        requirement,
    ]
    settings |= {"UV_HTTP_RETRIES": "0"}
    return (
        subprocess.run(command, env=settings, cwd=ROOT, capture_output=True, check=False).returncode
        == 0
    )


def _install_workspace() -> None:
    packages = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
    editable = [argument for package in packages for argument in ("--editable", package)]
    _pip_install(
        f"installing the {len(packages)} packages of the workspace",
        "check packages/*/pyproject.toml",
        *editable,
    )
    # As in install(): editable packages would be compiled by each process, too.
    sources = [*ROOT.glob("packages/*/src"), ROOT / "harness"]
    subprocess.run([PYTHON, "-m", "compileall", "-q", *sources], check=False)


def _pip_install(what: str, advice: str, *arguments: str | Path) -> None:
    """Install into .venv without dependencies."""
    uv, settings = find_uv()
    command = [uv, "pip", "install", "--quiet", "--python", PYTHON, "--no-deps", *arguments]
    _run(what, command, settings, advice)


def install_emulator_libs() -> None:
    """Install the emulator's compiled libraries if a find-links location has them (tools/libs). Those
    of other sources do no harm: the emulator compiles then."""
    name = "ascend-emulator-libs"
    if _can_install(name, PYTHON, "--no-index"):
        _pip_install(f"installing {name}", "check the find-links location", "--no-index", name)


def _start_compiling_emulator() -> None:
    """Compile the emulator while the other requirements are installed; `ascend-emulator build`
    waits for it by the cache's lock.

    It needs the files of torch and torch-npu only. A failure is reported by `ascend-emulator
    build`, which starts again.
    """
    code = "from ascend_emulator import build; build.library_dir()"
    environment = {**variables(), "PYTHONPATH": str(ROOT / "packages" / "ascend-emulator" / "src")}
    null = subprocess.DEVNULL
    subprocess.Popen(
        [PYTHON, "-c", code], env=environment, cwd=ROOT, stdin=null, stdout=null, stderr=null
    )


def _compile_emulator() -> None:
    _run(
        "compiling the emulator, unless it is in its cache",
        [VENV / "bin" / "ascend-emulator", "build"],
        variables(),
        "the lines above name what is missing",
        quiet=False,
    )


def _run(what: str, command: list, env: dict[str, str], advice: str, *, quiet: bool = True) -> None:
    """Run one step; a terminal shows the elapsed seconds of `quiet` steps, which print nothing
    themselves."""
    _say(what)
    ticking = quiet and sys.stdout.isatty()
    try:
        arguments, null = [str(part) for part in command], subprocess.DEVNULL
        with subprocess.Popen(arguments, env=env, cwd=ROOT, stdin=null, stdout=null) as process:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1 if ticking else None)
                if ticking:
                    print(f"\033[A\r{_elapsed()} {what}")
            failed = process.returncode != 0
    except OSError as error:
        print(f"set-up: {error}", file=sys.stderr)
        failed = True
    if failed:
        sys.exit(f"set-up: failed while {what}; {advice}")


def _elapsed() -> str:
    return f"set-up [{time.monotonic() - _start:3.0f} s]"


def _say(what: str) -> None:
    print(f"{_elapsed()} {what}", flush=True)
