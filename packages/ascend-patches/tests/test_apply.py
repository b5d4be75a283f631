# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Applying patches, each case in a process of its own, since a patch is for a process."""

import pytest

VICTIM = """
def one():
    return 1


class Box:
    @staticmethod
    def lid():
        return 'lid'

    @classmethod
    def name(cls):
        return cls.__name__

    def size(self):
        return 1
"""
ENTER = "from ascend_patches import enter; enter('platform')\n"
PRINT = "from victim import m; print(m.one())\n"


@pytest.fixture
def patched(world):
    world.victim("m", VICTIM)
    world.patch("one", "victim.m:one", "lambda: original() + 10")
    return world


@pytest.mark.parametrize(
    "script",
    [
        ENTER + PRINT,
        "import victim.m\n" + ENTER + PRINT,
        ENTER + ENTER + "import victim.m\n" + ENTER + PRINT,
    ],
    ids=["before the import", "after the import", "again and again"],
)
def test_applied_once_whenever_the_module_comes(patched, script):
    assert patched.run(script) == ("11", "")


def test_applied_at_the_end_of_an_import_that_is_under_way(patched):
    # As vllm.v1.engine.core is when the engine core's process resolves the platform.
    patched.victim("early", ENTER + "from victim import m")
    patched.victim("m", "import sys\n" + ENTER + "assert 'one' not in globals()\n" + VICTIM)
    assert patched.run("from victim.m import one; print(one())") == ("11", "")


def test_module_that_fails_is_patched_when_it_comes_at_last(patched):
    patched.victim("m", "import os\nif 'READY' not in os.environ: raise ImportError\n" + VICTIM)
    retry = (
        "import os\ntry:\n    import victim.m\nexcept ImportError:\n    os.environ['READY'] = '1'\n"
    )
    assert patched.run(ENTER + retry + PRINT) == ("11", "")


def test_kinds_of_methods_keep_their_kind(world):
    world.victim("m", VICTIM)
    world.patch("lid", "victim.m:Box.lid", "lambda: original() + '!'")
    world.patch("name", "victim.m:Box.name", "lambda cls: original(cls) + '!'")
    world.patch("size", "victim.m:Box.size", "lambda self: original(self) + 1")
    show = (
        "from victim.m import Box; print(Box.lid(), Box().lid(), Box.name(), Box().size(),"
        " Box.size.__qualname__)"
    )
    assert world.run(ENTER + show) == ("lid! lid! Box! 2 Box.size", "")


def test_another_scope_is_left_alone(world):
    world.victim("m", VICTIM)
    world.patch("one", "victim.m:one", "lambda: 2", scope="worker")
    assert world.run(ENTER + PRINT + "enter('worker')\n" + PRINT) == ("1\n2", "")


def test_second_patch_of_a_target_is_disabled(patched):
    patched.patch("two", "victim.m:one", "lambda: 2")
    out, stderr = patched.run(ENTER + PRINT)
    assert out == "11"
    assert (
        stderr == "patch p.two disabled: target victim.m:one is patched by p.one already; "
        "disable one of the two: VLLM_ASCEND_DISABLE_PATCHES=p.one"
    )


def test_patch_of_a_method_of_a_patched_class_is_disabled(world):
    world.victim("m", VICTIM)
    world.patch("box", "victim.m:Box", "type('Box', (original,), {})")
    world.patch("size", "victim.m:Box.size", "lambda self: 5")
    out, stderr = world.run(ENTER + "from victim.m import Box; print(Box().size())")
    assert out == "1"
    assert "p.size disabled: target victim.m:Box.size is patched by p.box already" in stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (VICTIM.replace("return 1", "return 1 + 0", 1), "target victim.m:one has changed: found "),
        (
            VICTIM.replace("def one", "def uno"),
            "target victim.m:one is missing: victim.m does not define one; ",
        ),
    ],
    ids=["changed", "renamed"],
)
def test_drift_is_one_line_and_the_original_stays(patched, text, message):
    patched.victim("m", text)
    out, lines = patched.run(
        ENTER + "from victim import m; print(getattr(m, 'one', m.__dict__.get('uno'))())"
    )
    assert out == "1"
    assert lines.startswith(f"patch p.one disabled: {message}")
    assert lines.endswith("compare the patch with the new source, or narrow its range >=0")
    assert "\n" not in lines


def test_patch_that_raises_is_one_line(world):
    world.victim("m", VICTIM)
    world.patch("one", "victim.m:one", "1 / 0")
    assert world.run(ENTER + PRINT) == (
        "1",
        "patch p.one disabled: ZeroDivisionError: division by zero",
    )


def test_version_out_of_range_is_quiet(world):
    world.victim("m", VICTIM)
    world.patch("one", "victim.m:one", "lambda: 2", vllm=">=0.32.5")
    assert world.run(ENTER + PRINT) == ("1", "")
    world.variables["VLLM_VERSION"] = "0.32.7"
    assert world.run(ENTER + PRINT) == ("2", "")


def test_switched_off_by_the_environment(patched):
    patched.variables["VLLM_ASCEND_DISABLE_PATCHES"] = "p.one"
    assert patched.run(ENTER + PRINT) == ("1", "")
    patched.variables["VLLM_ASCEND_DISABLE_PATCHES"] = "p.on"
    out, stderr = patched.run(ENTER + PRINT)
    assert out == "11"
    assert stderr == "unknown patch 'p.on' in VLLM_ASCEND_DISABLE_PATCHES; fix: use 'p.one'"


def test_patch_disabled_by_configuration_here_and_in_children(patched):
    configure = "from ascend_platform import options; import os; take = options.configure\n"
    off = (
        "take({'ascend': {'patches': {'disable': ['p.one']}}});"
        " print(os.environ['VLLM_ASCEND_DISABLE_PATCHES'])\n"
    )
    on = "take({}); print('VLLM_ASCEND_DISABLE_PATCHES' in os.environ)\n"
    assert patched.run(ENTER + PRINT + configure + off + PRINT + on + PRINT) == (
        "11\np.one\n1\nFalse\n11",
        "",
    )


@pytest.mark.parametrize(
    ("disable", "message"),
    [
        ("['p.won']", "unknown patch 'p.won'; fix: use 'p.one'"),
        ("'p.one'", "disable is 'p.one'; supported: a list of strings; fix: correct or remove it"),
    ],
)
def test_configuration_that_is_wrong_is_refused(patched, disable, message):
    configure = "from ascend_platform import options\ntry:\n"
    configure += (
        f"    options.configure({{'ascend': {{'patches': {{'disable': {disable}}}}}}})\nexcept"
        " ValueError as e: print(e)"
    )
    out, _ = patched.run(ENTER + configure)
    assert message in out


def test_filtered_by_vllm_plugins(patched):
    platform = "from ascend_platform.process import scopes; scopes.enter('platform')\n"
    assert patched.run(platform + PRINT)[0] == "11"
    for names, result in {
        "ascend": "1",
        "ascend,p": "1",
        "ascend,ascend_patches": "1",
        "ascend_patches,p": "11",
    }.items():
        patched.variables["VLLM_PLUGINS"] = names
        assert patched.run(platform + PRINT)[0] == result, names


def test_patch_of_an_unreadable_file_is_one_line_and_the_others_serve(patched):
    patched.patch("size", "victim.m:Box.size", "original", by="patch_broken:size")
    patched.directory.joinpath("plugin_p", "patch_broken.py").write_text(
        "import nothing_of_this_name"
    )
    out, stderr = patched.run(ENTER + PRINT)
    assert out == "11"
    assert (
        stderr == "patch broken.size disabled: ModuleNotFoundError: No module named"
        " 'nothing_of_this_name'"
    )


@pytest.mark.parametrize(
    ("target", "fields", "message"),
    [
        ("victim.m:one", {"scope": "somewhere"}, "patch p.one ignored: it has scope 'somewhere'; "),
        ("victim.m:one", {"vllm": "new"}, "patch p.one ignored: Invalid specifier: 'new'"),
        ("victim.m:", {}, "overrides of plugin_p disabled: ValueError: target 'victim.m:' is not "),
        ("victim.m:one", {"wy": "w"}, "overrides of plugin_p disabled: TypeError: "),
    ],
)
def test_malformed_row_is_one_line(world, target, fields, message):
    world.victim("m", VICTIM)
    world.patch("one", target, "lambda: 2", fingerprint="0", **fields)
    out, stderr = world.run(ENTER + PRINT)
    assert out == "1"
    assert stderr.startswith(message)
    assert "\n" not in stderr


def test_names_of_processes_are_as_vllm_gives_them(world):
    show = "import multiprocessing as m; from ascend_platform.process.scopes import scopes_here\n"
    for name in ("MainProcess", "EngineCore", "EngineCore_DP1", "VllmWorker-0", "ApiServer_0"):
        show += f"m.current_process().name = '{name}'; print(*scopes_here())\n"
    assert world.run(show)[0].split() == ["platform", "engine", "engine", "worker", "platform"]
    world.variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    assert world.run(show)[0].split() == [
        "platform",
        "engine",
        "engine",
        "engine",
        "worker",
        "platform",
        "engine",
    ]
