"""register() in processes of its own, since a process has its device, or the lack of it, for good."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import ascend_platform
import pytest

SCRIPT = """
import ascend_platform
import sys
names = [ascend_platform.register() for _ in range(2)]
torch = sys.modules.get("torch")
opened = torch is not None and hasattr(torch, "npu") and torch.npu.is_initialized()
print("\\nresult", *names, "opened" if opened else "untouched")
"""


def run(prologue="", flags=(), **environment):
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, *flags, "-c", prologue + SCRIPT], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (result,) = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("result ")]
    return result, [line for line in done.stderr.splitlines() if "not activated" in line]


def test_with_a_device_it_names_the_platform_and_opens_nothing():
    out, said = run()
    assert out == ["ascend_platform.platform.NPUPlatform"] * 2 + ["untouched"]
    assert said == []


def test_without_cann_it_names_the_library_and_what_to_do():
    # the libraries are found through LD_LIBRARY_PATH; torch would load torch_npu itself and fail before us
    out, said = run(LD_LIBRARY_PATH="", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert out == ["None", "None", "untouched"]
    (line,) = said
    assert "library lib" in line
    assert ".so was not found" in line
    assert "set_env.sh" in line


@pytest.mark.parametrize("visible", ["", "7"])
def test_without_a_visible_device_it_says_what_hides_them(visible):
    out, said = run(ASCEND_RT_VISIBLE_DEVICES=visible)
    assert out == ["None", "None", "untouched"]
    (line,) = said
    assert f"no NPU is visible with ASCEND_RT_VISIBLE_DEVICES='{visible}'" in line


def test_without_torch_npu_it_says_how_to_install_it(tmp_path):
    # this environment without that one package: its other entries, linked, and no start-up files (-S)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith("torch_npu"):
            (tmp_path / entry.name).symlink_to(entry)
    sources = Path(ascend_platform.__file__).parents[1]
    out, said = run(flags=["-S"], PYTHONPATH=os.pathsep.join([str(tmp_path), str(sources)]), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert out == ["None", "None", "untouched"]
    (line,) = said
    assert "it needs torch-npu" in line
    assert "not installed; run: pip install" in line


def test_with_another_torch_it_says_which_one_fits(tmp_path):
    info = tmp_path / "torch-2.0.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.0\n")
    out, said = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n")
    assert out == ["None", "None", "untouched"]
    (line,) = said
    assert "found 2.0.0" in line
    assert "pip install 'torch==2.13.0.*'" in line


def test_with_another_vllm_it_stands_aside():
    out, said = run(VLLM_VERSION="0.99.0")
    assert out == ["None", "None", "untouched"]
    (line,) = said
    assert "vllm" in line
    assert "found 0.99.0" in line


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_vllm_command_without_cann_ends_in_one_line(autoload):
    # through the wheel's ascend_platform.pth; torch loads torch_npu itself, or transformers does
    env = {**os.environ, "LD_LIBRARY_PATH": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    command = [str(Path(sys.executable).parent / "vllm"), "serve", "a-model"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ascend-platform: CANN's library lib")
    assert "set_env.sh" in last
    assert "Traceback" not in done.stderr
    assert "Failed to infer device type" not in done.stderr


@pytest.fixture
def incumbent(tmp_path):
    """A directory with the metadata of another wheel that has our plugins' names, as vllm-ascend 0.18 has."""
    info = tmp_path / "vllm_ascend-0.18.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: vllm-ascend\nVersion: 0.18.0\n")
    points = (
        "[vllm.platform_plugins]\nascend = vllm_ascend:register\n[vllm.general_plugins]\nascend_kv_connector = vllm_ascend:a\n"
    )
    info.joinpath("entry_points.txt").write_text(points)
    return tmp_path


CLASH = (
    "vllm-ascend 0.18.0 is installed too and has plugins of the same name (ascend, ascend_kv_connector), of which vLLM "
    "keeps one; run: pip uninstall -y vllm-ascend"
)


def test_beside_another_wheel_with_our_names_nothing_is_activated(incumbent):
    out, said = run(PYTHONPATH=str(incumbent))
    assert out == ["None", "None", "untouched"]
    (line,) = said
    assert line.endswith(f"Ascend platform not activated: {CLASH}")


def test_vllm_command_beside_another_wheel_with_our_names_ends_in_one_line(incumbent):
    command = [str(Path(sys.executable).parent / "vllm"), "serve", "a-model"]
    env = {**os.environ, "PYTHONPATH": str(incumbent)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"ascend-platform: {CLASH}\n")


def test_siblings_stand_aside_beside_another_wheel_with_our_names(incumbent):
    script = "import ascend_attention; from ascend_platform import extension; ascend_attention.register(); "
    script += "print(extension.state('ascend-attention'))"
    env = {**os.environ, "PYTHONPATH": str(incumbent)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().endswith(f"standing aside: {CLASH}"), done.stderr


def test_start_hook_leaves_other_errors_as_they_are():
    hook = "import ascend_platform.cli.excepthook; ascend_platform.cli.excepthook.install()\n"
    other = "raise RuntimeError('x') from ImportError('libother.so: cannot open shared object file')"
    done = subprocess.run([sys.executable, "-c", hook + other], capture_output=True, text=True, timeout=60)
    assert "Traceback" in done.stderr
    assert "libother.so" in done.stderr


def test_start_hook_is_for_vllm_alone():
    script = "import sys; print(sys.excepthook is sys.__excepthook__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "True"
