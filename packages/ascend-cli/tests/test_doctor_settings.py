# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""``vllm-ascend doctor`` on settings: environment variables, the machine's tuning, files, memory
and ``--additional-config``.

The faults are environment variables, process limits and mounted file systems.
"""

import json
import subprocess

import pytest
from ascend_cli import tuning
from ascend_platform import host
from harness.project.doctor import bad, examine, failing, run


@pytest.mark.parametrize(
    ("value", "state", "says", "fix"),
    [
        ("", "fail", "no plugin load", "unset VLLM_PLUGINS"),
        (
            "ascend, ascend_attention",
            "warn",
            "spaces",
            "export VLLM_PLUGINS=ascend,ascend_attention",
        ),
        (
            "ascend_attention",
            "fail",
            "leaves out ascend",
            "export VLLM_PLUGINS=ascend,ascend_attention",
        ),
        (
            "ascend,ascend_atention",
            "warn",
            "no plugin has the name ascend_atention",
            "export VLLM_PLUGINS=ascend,ascend_attention",
        ),
        ("ascned", "fail", "no plugin has the name ascned", "export VLLM_PLUGINS=ascend"),
        ("ascend,ascend_attention", "ok", "ascend,ascend_attention", ""),
    ],
)
def test_plugin_names(value, state, says, fix):
    status, lines = examine(VLLM_PLUGINS=value)
    line = lines["environment", "VLLM_PLUGINS"]
    assert (line[0], line[2], status) == (state, fix, int(state == "fail"))
    assert says in line[1]


def test_each_fix_of_a_filter_is_the_same_and_works():
    """Every filtered plugin that the fix allows shows it, and the value that it sets allows
    them."""
    for value in ("", "ascend_patches", "ascend,ascend_atention"):
        problems = json.loads(run("plugins", "--json", VLLM_PLUGINS=value).stdout)["plugins"]
        (fix,) = {each["fix"] for each in problems if each["state"] == "off"} - {""}
        fixed = {"VLLM_PLUGINS": fix.partition("=")[2]} if "=" in fix else {}
        after = json.loads(run("plugins", "--json", **fixed).stdout)["plugins"]
        active = {each["name"] for each in after if each["state"] == "active"}
        assert {each["name"] for each in problems if each["fix"]} <= active
    last = run("plugins", VLLM_PLUGINS=value).stdout.splitlines()[-1]
    assert last == f"VLLM_PLUGINS: no plugin has the name ascend_atention; fix: {fix}"


def test_filtered_component_warns_and_filtered_platform_fails():
    status, lines = examine(VLLM_PLUGINS="ascend")
    assert status == 0
    names = (
        "ascend_attention, ascend_cli, ascend_communicator, ascend_kv_connector,"
        " ascend_model_loader, ascend_models, ascend_patches, ascend_quantization"
    )
    fix = f"export VLLM_PLUGINS=ascend,{names.replace(', ', ',')}"
    assert lines["plugins", "filtered out by VLLM_PLUGINS"] == ("warn", names, fix)
    assert lines["plugins", "lora_hf_hub_resolver of vllm 0.32.0+empty"][0] == "ok"
    status, lines = examine(VLLM_PLUGINS="ascend_attention")
    assert status == 1
    assert lines["plugins", "ascend of ascend-platform 0.1.0"][0] == "fail"


def test_target_device():
    for value, state in (("cpu", "fail"), ("empty", "warn")):
        status, lines = examine(VLLM_TARGET_DEVICE=value)
        assert lines["environment", "VLLM_TARGET_DEVICE"][0] == state
        assert lines["environment", "VLLM_TARGET_DEVICE"][2] == "unset VLLM_TARGET_DEVICE"
        assert status == int(state == "fail")


def test_variables_that_nothing_reads():
    given = {
        "VLLM_PLUGIN": "ascend",
        "VLLM_ASCEND_ENABLE_NZ": "1",
        "ASCEND_VISIBLE_DEVICE": "0",
        "HCCL_BUFSIZE": "200",
    }
    harmless = {
        "ASCEND_LAUNCH_BLOCKING": "0",
        "HCCL_BUFFSIZE": "200",
        "ASCEND_OF_MY_OWN_COMPANY": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    status, lines = examine(**given, **harmless)
    assert status == 0
    assert {title: fix for title, (_, fix) in bad(lines).items()} == {
        "VLLM_PLUGIN": "export VLLM_PLUGINS=$VLLM_PLUGIN; unset VLLM_PLUGIN",
        "VLLM_ASCEND_ENABLE_NZ": "unset VLLM_ASCEND_ENABLE_NZ",
        "ASCEND_VISIBLE_DEVICE": (
            "export ASCEND_VISIBLE_DEVICES=$ASCEND_VISIBLE_DEVICE; unset ASCEND_VISIBLE_DEVICE"
        ),
        "HCCL_BUFSIZE": "export HCCL_BUFFSIZE=$HCCL_BUFSIZE; unset HCCL_BUFSIZE",
    }


@pytest.mark.parametrize(
    ("variable", "value", "state", "says"),
    [
        ("HCCL_IF_IP", "127.0.0.1", "ok", "127.0.0.1"),
        ("HCCL_IF_IP", "203.0.113.1", "fail", "not an address of this machine"),
        ("VLLM_HOST_IP", "here", "fail", "not an IP address"),
        ("HCCL_SOCKET_IFNAME", "lo", "ok", "lo: lo"),
        ("HCCL_SOCKET_IFNAME", "=l", "fail", "no such interface"),
        ("HCCL_SOCKET_IFNAME", "l", "ok", "l: lo"),
        ("HCCL_SOCKET_IFNAME", "^nosuch", "ok", "lo"),
        ("GLOO_SOCKET_IFNAME", "nosuch0", "fail", "no such interface"),
    ],
)
def test_interfaces(variable, value, state, says):
    status, lines = examine(**{variable: value})
    line = lines["HCCL", variable]
    assert (line[0], status) == (state, int(state == "fail"))
    assert says in line[1]


# Settings that make serving slow or unstable.


def test_settings_of_queue_and_hccl():
    given = {
        "TASK_QUEUE_ENABLE": "2",
        "HCCL_OP_EXPANSION_MODE": "HOST",
        "HCCL_BUFFSIZE": "1024",
        "ASCEND_LAUNCH_BLOCKING": "1",
    }
    status, lines = examine(
        ASCEND_EMULATOR_NPUS="2", ASCEND_CUSTOM_OPP_PATH="/a/vllm_ascend/ops:/mine", **given
    )
    assert status == 0
    problems = bad(lines)
    assert (
        problems["TASK_QUEUE_ENABLE"][1]
        == "export TASK_QUEUE_ENABLE=1, or serve with --enforce-eager"
    )
    assert (
        problems["ASCEND_LAUNCH_BLOCKING"][1]
        == "unset ASCEND_LAUNCH_BLOCKING, or serve with --enforce-eager"
    )
    assert "HCCL_OP_EXPANSION_MODE" not in problems
    assert problems["HCCL_BUFFSIZE"][0].startswith(
        "1024 MiB: 8.0 GiB of an NPU with 4 communicators"
    )
    assert problems["ASCEND_CUSTOM_OPP_PATH"][1] == "export ASCEND_CUSTOM_OPP_PATH=/mine"
    wrong = {"TASK_QUEUE_ENABLE": "3", "HCCL_OP_EXPANSION_MODE": "aiv", "HCCL_BUFFSIZE": "big"}
    assert examine(**wrong)[0] == 1
    assert set(failing(examine(**wrong)[1])) == set(wrong)


@pytest.mark.parametrize(
    ("mode", "says"),
    [(None, []), ("AIV", ["only for tensor parallelism"]), ("AI_CPU", ["AI_CPU"])],
)
def test_no_mode_of_collectives_is_a_warning(monkeypatch, mode, says):
    for name in (
        "HCCL_OP_EXPANSION_MODE",
        "HCCL_BUFFSIZE",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        "HCCL_EXEC_TIMEOUT",
    ):
        monkeypatch.delenv(name, raising=False)
    if mode:
        monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", mode)
    results = list(tuning.hccl(8))
    assert [result.state for result in results] == ["ok"] * len(says)
    assert all(text in result.found for text, result in zip(says, results, strict=True))


@pytest.mark.parametrize(
    ("step", "collective", "problems"),
    [
        (None, None, ""),
        (
            "300",
            None,
            (
                "300 s: a step ends before a collective does (1836 s), whose error names the rank"
                " that is missing"
            ),
        ),
        ("300", "240", ""),
        ("2000", None, ""),
        ("300", "0", ""),
    ],
)
def test_a_step_that_ends_before_a_collective_is_a_warning(monkeypatch, step, collective, problems):
    for name, value in (
        ("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", step),
        ("HCCL_EXEC_TIMEOUT", collective),
    ):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("HCCL_OP_EXPANSION_MODE", raising=False)
    results = list(tuning.hccl(8))
    assert [(result.state, result.found) for result in results] == (
        [("warn", problems)] if problems else []
    )


@pytest.mark.parametrize(
    ("governors", "state"), [(["performance"] * 2, "ok"), (["performance", "powersave"], "warn")]
)
def test_cpu_governor(tmp_path, governors, state):
    for number, governor in enumerate(governors):
        directory = tmp_path / f"cpu{number}" / "cpufreq"
        directory.mkdir(parents=True)
        (directory / "scaling_governor").write_text(f"{governor}\n")
    (result,) = tuning.cpu_governor(tmp_path)
    assert result.state == state
    assert ("powersave on 1 CPUs" in result.found) == (state == "warn")


def test_cann_older_than_torch_npu_wants():
    (result,) = tuning.cann_for_torch_npu("9.0.RC1")
    assert (result.state, result.fix) == ("warn", "install CANN 9.1")
    assert list(tuning.cann_for_torch_npu("9.1.0")) == list(tuning.cann_for_torch_npu("")) == []


def test_versions_that_limit_the_number_of_graphs_are_warned_of():
    """The version file of a driver is not emulated; CANN's runtime tells its version."""
    problems = bad(examine(ASCEND_EMULATOR_DRIVER="24.1.rc3")[1])["streams of graphs"]
    assert problems[0].startswith(
        "driver 24.1.rc3, CANN 9.1.0: each graph keeps streams of the NPU"
    )
    assert problems[1] == "install CANN 8.5.0 and driver 25.5.1 or later"
    lines = examine(ASCEND_EMULATOR_DRIVER="25.5.1")[1]
    assert lines["chip and driver", "driver"][1] == "25.5.1"
    assert "streams of graphs" not in bad(lines)


def test_firmware_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "DRIVER", tmp_path / "driver")
    (tmp_path / "firmware").mkdir()
    (tmp_path / "firmware" / "version.info").write_text("Version=7.8.0.2\n")
    assert host.firmware_version() == "7.8.0.2"


def test_files_of_vllm_ascend(tmp_path):
    (tmp_path / "vllm_ascend").mkdir()
    (tmp_path / "vllm_ascend" / "__init__.py").write_text("")
    assert bad(examine(path=[tmp_path])[1])["vllm_ascend"][1].startswith(
        f"rm -r {tmp_path}/vllm_ascend"
    )


# Disk, memory, configuration


def test_model_cache_that_is_not_writable():
    status, lines = examine(HF_HOME="/dev/null/models")
    assert status == 0
    assert "/dev/null/models/hub is not writable" in bad(lines)["model cache"][0]


def test_small_disk_and_shared_memory(tmp_path):
    mount = (
        f"mount -t tmpfs -o size=1m tmpfs {tmp_path} && mount -t tmpfs -o size=1m tmpfs /dev/shm"
    )
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    before = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    status, lines = examine(before=before, HF_HOME=str(tmp_path))
    assert status == 0
    assert bad(lines)["model cache"] == (
        f"0.0 GiB free for {tmp_path}/hub; vLLM may need 10 GiB",
        "export HF_HOME=<a directory on a larger disk>",
    )
    assert "--shm-size" in bad(lines)["/dev/shm"][1]


def test_little_memory():
    _, lines = examine(before=["prlimit", f"--as={4 << 30}"])
    assert bad(lines)["memory"][0] == "4.0 GiB free; vLLM may need 8 GiB"


@pytest.mark.parametrize(
    ("given", "state", "says", "fix"),
    [
        ('{"ascend": {}}', "ok", "known keys only", ""),
        (
            '{"ascend": {"atention": {}}}',
            "fail",
            "no key 'atention'",
            "correct the key (use 'attention')",
        ),
        (
            '{"ascend": {"attention": {"fast": 1}}}',
            "fail",
            "no key 'fast'",
            "correct the key (remove it)",
        ),
        ('{"ascend": 1}', "fail", "must be an object, not 1", 'write {"NAME": {…}} there'),
        ("{'ascend': {}}", "fail", "not valid JSON", "in single quotes"),
        ("[]", "fail", "not an object", "--additional-config"),
    ],
)
def test_additional_config(given, state, says, fix):
    status, lines = examine("--additional-config", given)
    line = lines["configuration", "--additional-config"]
    assert (line[0], status) == (state, int(state == "fail"))
    assert says in line[1]
    assert fix in line[2]
    assert "fix: " not in line[1]


def test_keys_of_additional_config_for_other_plugins():
    status, lines = examine("--additional-config", '{"ascend_scheduler_config": {}}')
    assert status == 0
    assert (
        bad(lines)["--additional-config, 'ascend_scheduler_config'"][0]
        == "no installed wheel of ours reads this key"
    )


# The commands
