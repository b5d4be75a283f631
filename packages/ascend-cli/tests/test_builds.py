# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""torchvision and torchaudio built for CUDA, or for another torch, beside torch's CPU build: one
line with the fix, in vLLM's command, in the doctor and for the errors of their imports."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from ascend_cli.diagnostics import explanations
from ascend_platform.plugins import builds, requirements
from harness.project.distributions import write_metadata
from harness.project.doctor import examine, failing
from packaging.requirements import Requirement

TORCH = version("torch")
INDEX = "--index-url https://download.pytorch.org/whl/cpu"
PAIR = f"'torch=={TORCH.partition('+')[0]}'"
LIBRARIES = {"torchvision": "_C_stable.so", "torchaudio": "lib/_torchaudio.so"}


@pytest.fixture(params=[("x86_64", "+cpu"), ("aarch64", "")], ids=["x86_64", "aarch64"])
def local(request, monkeypatch):
    """Suffix of the version of a CPU build on PyTorch's index."""
    machine, local = request.param
    monkeypatch.setattr("platform.machine", lambda: machine)
    return local


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package with a library that needs another one, in a directory for PYTHONPATH, and
    returns the directory."""

    def install(name, release, needed="libtorch_cuda.so", requires=f"torch=={PAIR[8:-1]}"):
        write_metadata(tmp_path, name, release, [requires])
        library = tmp_path / name / LIBRARIES[name]
        library.parent.mkdir(parents=True)
        library.write_bytes(b"\x7fELF \0" + needed.encode() + b"\0libc.so.6\0")
        (tmp_path / name / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return tmp_path

    return install


def end_of_vllm(directory):
    """Exit status and standard error of a command of vLLM that would end with status 0."""
    (directory / "vllm").touch()
    command = [sys.executable, str(directory / "vllm"), "serve"]
    env = {**os.environ, "PYTHONPATH": str(directory)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("name", "release"), [("torchvision", "0.28.0"), ("torchaudio", "2.11.1+cu130")]
)
def test_an_extension_for_cuda_ends_vllm_in_one_line(install, name, release):
    directory = install(name, release)
    line = f"{name} {release} is built for CUDA, and cannot be imported with torch {TORCH}"
    pin = requirements.cpu_build(name, release.partition("+")[0])
    fix = f"pip install --force-reinstall --no-deps {pin} {INDEX}"
    assert end_of_vllm(directory) == (1, f"ascend-platform: {line}; fix: {fix}\n")
    _, lines = examine("versions", path=[directory])
    assert (line, fix) in failing(lines).values()


def test_an_extension_for_the_cpu_is_taken(install):
    directory = install("torchvision", "0.28.0+cpu", "libtorch_cpu.so")
    assert end_of_vllm(directory) == (0, "")
    _, lines = examine("versions", path=[directory])
    assert failing(lines) == {}
    assert lines["versions", "torchvision"][:2] == ("ok", "0.28.0+cpu")


def test_a_fix_names_the_cpu_build(install, local):
    """Without its local version pip takes the CUDA build of another index, and reports success."""
    install("torchvision", "0.28.0")
    pin = f"'torchvision==0.28.0{local}'"
    fix = f"pip install --force-reinstall --no-deps {pin} {INDEX}"
    assert builds.cuda_extensions().fix == fix


def test_an_extension_for_another_torch_is_replaced_by_its_pair(install):
    directory = install("torchvision", "0.27.0", "libtorch_cpu.so", "torch==2.12.0")
    conflict = f"torchvision 0.27.0 requires torch==2.12.0, found {TORCH}"
    vision = requirements.built_for_torch("torchvision", PAIR[8:-1])
    fix = f"pip install --upgrade {vision} {PAIR} {INDEX}"
    _, lines = examine("versions", path=[directory])
    assert failing(lines)["torchvision"] == (conflict, fix)
    error = RuntimeError("operator torchvision::nms does not exist")
    assert explanations.explain(error) == f"{conflict}; fix: {fix}"


def test_an_extension_for_cuda_and_another_torch(install, local):
    install("torchvision", "0.27.0", requires="torch==2.12.0")
    vision = requirements.built_for_torch("torchvision", PAIR[8:-1])
    assert vision.endswith(f"{local}'")
    assert builds.cuda_extensions().fix == f"pip install --upgrade {vision} {PAIR} {INDEX}"
    install("torchaudio", "2.11.0", requires="torch==2.11.0")
    both = f"{vision} torchaudio {PAIR}"
    assert builds.cuda_extensions().fix == f"pip install --upgrade {both} {INDEX}"


@pytest.mark.parametrize(
    ("torch", "vision"),
    [
        ("2.10.0", "0.25.0"),
        ("2.12.1", "0.27.1"),
        ("2.13.0", "0.28.0"),
        ("2.14.0", "0.29.0"),
        ("2.15.0a0", None),
    ],
)
def test_torchvision_that_is_built_for_a_torch(torch, vision):
    """By the requirements of torchvision's wheels."""
    pin = requirements.cpu_build("torchvision", vision) if vision else "torchvision"
    assert requirements.built_for_torch("torchvision", torch) == pin


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torchvision", "operator torchvision::nms does not exist"),
        ("torchaudio", "Could not load this library: /a/torchaudio/lib/_torchaudio.so"),
    ],
)
def test_an_import_that_fails_for_another_reason(install, name, message):
    install(name, "0.28.0", "libother.so")
    pin = requirements.cpu_build(name, "0.28.0")
    fix = f"pip install --force-reinstall --no-deps {pin} {INDEX}"
    line = f"{name} 0.28.0 cannot be loaded with torch {TORCH}; fix: {fix}"
    assert explanations.explain(OSError(message)) == line


def test_the_fix_of_torch_for_cuda_names_what_is_built_for_it(install, cuda_torch):
    (cuda_torch / "torch" / "lib" / "libtorch_cuda.so").touch()
    install("torchvision", "0.28.0")
    directory = install("torchaudio", "2.11.1")
    built = {"torch": PAIR[8:-1], "torchvision": "0.28.0", "torchaudio": "2.11.1"}
    pins = " ".join(requirements.cpu_build(*each) for each in built.items())
    status, error = end_of_vllm(directory)
    assert status == 1
    assert error.endswith(f"; fix: pip install --force-reinstall --no-deps {pins} {INDEX}\n")


def test_the_fix_of_torch_for_cuda_is_the_version_of_torch_npu(install, cuda_torch):
    directory = install("torchvision", "0.28.0")
    write_metadata(directory, "torch-npu", "2.12.0", ["torch==2.12.0.*"])
    status, error = end_of_vllm(directory)
    assert status == 1
    pins = [("torch", "2.12.0"), ("torchvision", "0.27.0")]
    names = " ".join(requirements.cpu_build(*each) for each in pins)
    assert error.endswith(f"; fix: pip install {names} {INDEX}\n")


@pytest.mark.parametrize("wanted", ["==2.12.1", "==2.12.1.*"])
def test_another_torch_is_installed_with_what_is_built_for_it(install, local, wanted):
    command = requirements.install_command(Requirement(f"torch{wanted}"))
    pins = f"'torch==2.12.1{local}' 'torchvision==0.27.1{local}'"
    assert command == f"pip install {pins} {INDEX}"


def test_newer_torches_are_installed_with_what_is_built_for_them(install):
    torch = Requirement("torch>=2.12")
    assert requirements.install_command(torch) == f"pip install 'torch>=2.12' torchvision {INDEX}"
    install("torchaudio", "2.11.1")
    command = requirements.install_command(Requirement("torch-npu>=2.14"))
    both = "torchvision torchaudio --extra-index-url https://download.pytorch.org/whl/cpu"
    assert command == f"pip install 'torch-npu>=2.14' {both}"
