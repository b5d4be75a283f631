# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""`vllm serve` in broken environments: the last line, or a line at the start, names the problem and
the fix."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ascend_cli.diagnostics import explanations
from ascend_platform.plugins.requirements import cpu_build
from harness.project.distributions import write_metadata

VLLM = str(Path(sys.executable).parent / "vllm")
NO_DEVICE = "vLLM found no device: Ascend platform not activated:"
ADDER = str(Path(__file__).parents[3] / "tools" / "models" / "adder")


@pytest.fixture
def installed(tmp_path):
    """Installs a distribution's metadata, and optionally a module, in a directory for PYTHONPATH,
    and returns the directory."""

    def install(name, version, requires=(), module=None):
        write_metadata(tmp_path, name, version, requires)
        if module is not None:
            package = tmp_path / name.replace("-", "_")
            package.mkdir()
            package.joinpath("__init__.py").write_text(module)
        return str(tmp_path)

    return install


def vllm(*arguments, **variables):
    """Run vLLM's command; return its exit status and the lines of standard error."""
    removed = (
        "VLLM_PLUGINS",
        "VLLM_VERSION",
        "VLLM_TARGET_DEVICE",
        "VLLM_LOGGING_LEVEL",
        "PYTHONPATH",
    )
    env = (
        {name: value for name, value in os.environ.items() if name not in removed}
        | {"HF_HUB_OFFLINE": "1"}
        | variables
    )
    done = subprocess.run([VLLM, *arguments], env=env, capture_output=True, text=True, timeout=400)
    return done.returncode, done.stderr.splitlines()


def serve(*arguments, **variables):
    return vllm("serve", ADDER, "--max-model-len", "1024", *arguments, **variables)


def ends(status_and_lines):
    """The last line of a command that fails without a traceback."""
    status, lines = status_and_lines
    assert status == 1
    assert [line for line in lines if "Traceback" in line] == []
    assert lines[-1].startswith("ascend-platform: ")
    return lines[-1].removeprefix("ascend-platform: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"VLLM_VERSION": "0.99.0"},
            (
                f"{NO_DEVICE} requires vllm",
                ", found 0.99.0; fix: VLLM_TARGET_DEVICE=empty",
            ),
        ),
        (
            {"VLLM_PLUGINS": "ascend_attention"},
            ("VLLM_PLUGINS: 'ascend_attention' leaves out ascend, without which vLLM", "=ascend,"),
        ),
        (
            {"VLLM_PLUGINS": " ascend"},
            ("VLLM_PLUGINS: ' ascend' has spaces", "fix: export VLLM_PLUGINS=ascend"),
        ),
        (
            {"ASCEND_RT_VISIBLE_DEVICES": "7"},
            (
                f"{NO_DEVICE} no NPU is visible: ASCEND_RT_VISIBLE_DEVICES='7' leaves 0",
                "; fix: unset ASCEND_RT_VISIBLE_DEVICES",
            ),
        ),
    ],
    ids=["another vLLM", "plugin filtered out", "spaces in the filter", "no device"],
)
def test_without_a_platform(variables, message):
    line = ends(serve(**variables))
    assert line.startswith(message[0])
    assert message[1] in line


@pytest.mark.slow
def test_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = ends(serve("--host", "127.0.0.1", "--port", str(port)))
    fix = "end that process, or choose another port with --port"
    assert line == f"port {port} is in use by another process (on 127.0.0.1); fix: {fix}"


@pytest.mark.slow
def test_another_torch_npu(installed):
    line = ends(serve(PYTHONPATH=installed("torch-npu", "2.12.0")))
    assert line.startswith(f"{NO_DEVICE} requires torch-npu")
    assert ", found 2.12.0; fix: pip install 'torch-npu" in line


def test_a_torch_npu_for_another_torch_that_cannot_be_loaded(installed):
    module = "raise ImportError('libtorch_npu.so: undefined symbol: _ZN3c10')"
    line = ends(serve(PYTHONPATH=installed("torch-npu", "2.12.0", ["torch==2.12.0"], module)))
    torch, vision = cpu_build("torch", "2.12.0"), cpu_build("torchvision", "0.27.0")
    assert (
        line == "torch_npu 2.12.0 cannot be loaded (libtorch_npu.so: undefined symbol: _ZN3c10):"
        " requires torch==2.12.0, found 2.13.0+cpu; fix: pip install"
        f" {torch} {vision} --index-url https://download.pytorch.org/whl/cpu"
    )


def test_an_error_of_a_torch_npu_that_fits_stays_as_it_is(installed):
    module = "raise ImportError('something else')"
    status, lines = serve(PYTHONPATH=installed("torch-npu", "2.13.0", module=module))
    assert status == 1
    assert any("Traceback" in line for line in lines)
    assert not [line for line in lines if line.startswith("ascend-platform: ")]
    assert lines[-1] == "vllm: ImportError: something else; fix: see the traceback above"


@pytest.mark.slow
def test_a_wrong_key_of_the_configuration():
    line = ends(serve("--additional-config", '{"ascend": {"patchez": {}}}'))
    assert line.startswith("additional_config ascend has no key 'patchez'")


@pytest.mark.slow
def test_refused_feature_and_its_traceback_with_debug_logging():
    options = ("--cpu-offload-gb", "1")
    assert "does not support weight offloading yet" in ends(serve(*options))
    status, lines = serve(*options, VLLM_LOGGING_LEVEL="DEBUG")
    assert status == 1
    assert "Traceback (most recent call last):" in lines
    assert "does not support weight offloading" in lines[-1]


def test_target_device_cpu_without_cpu_kernels():
    status, lines = serve(VLLM_TARGET_DEVICE="cpu")
    assert (status, len(lines)) == (1, 1)
    assert lines[0].startswith(
        "ascend-platform: VLLM_TARGET_DEVICE: 'cpu' makes vLLM use the CPU, for which this vLLM"
        " has no"
    )
    assert lines[0].endswith("; fix: unset VLLM_TARGET_DEVICE")


def test_two_tritons_and_target_device_are_warnings(installed):
    installed("triton", "3.9.0")
    status, lines = vllm(
        "--version", PYTHONPATH=installed("triton-ascend", "3.2.0"), VLLM_TARGET_DEVICE="empty"
    )
    assert status == 0
    assert [line for line in lines if line.startswith("ascend-platform: ")] == [
        (
            "ascend-platform: VLLM_TARGET_DEVICE: 'empty' is only for building vLLM; fix: unset"
            " VLLM_TARGET_DEVICE"
        ),
        (
            "ascend-platform: triton: triton 3.9.0 and triton-ascend 3.2.0 overwrite each other's"
            " files; fix: pip uninstall -y triton triton-ascend && pip install --no-deps"
            " triton-ascend==3.2.0"
        ),
    ]


def test_suffix_without_its_library():
    error = ImportError(
        "Arctic Inference is required for suffix decoding. Install via `pip install"
        " arctic-inference==0.1.1`."
    )
    assert explanations.explain(error).endswith("; fix: pip install 'ascend-platform[suffix]'")
