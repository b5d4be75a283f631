# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Contents and metadata of the built wheels, read from the wheels, not from the sources."""

import ast
import email
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest
from harness import checkout
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

COMPONENTS = {
    "ascend-platform",
    "ascend-attention",
    "ascend-cli",
    "ascend-communicator",
    "ascend-kv-connector",
    "ascend-model-loader",
    "ascend-models",
    "ascend-patches",
    "ascend-quantization",
}
# Required by components, and no plugins of vLLM.
LIBRARIES = {"ascend-transfer"}
META, EMULATOR = "vllm-ascend-all", "ascend-emulator"
REPOSITORY = "https://github.com/vllm-ascend-all/vllm-ascend-all"
NAMES = sorted({*COMPONENTS, *LIBRARIES, META, EMULATOR})
# Imported only where it is installed: colours of the doctor, the emulator's plugin, which pytest
# loads, and pip's tomli.
START_UP = "ascend_emulator_triton.pth"
NOT_REQUIRED = {"ascend-cli": {"rich"}, EMULATOR: {"pytest", "pip", "triton"}}


class Wheel:
    def __init__(self, path: Path) -> None:
        self.path = path
        archive = zipfile.ZipFile(path)
        self.files = {name: archive.read(name) for name in archive.namelist()}
        self.metadata = email.message_from_bytes(self.dist_info("METADATA"))
        self.requirements = list(map(Requirement, self.metadata.get_all("Requires-Dist") or []))
        parser = ConfigParser(delimiters="=")
        parser.read_string(self.dist_info("entry_points.txt").decode())
        self.entry_points = {group: dict(parser[group]) for group in parser.sections()}

    def dist_info(self, name: str) -> bytes:
        return next(
            (data for file, data in self.files.items() if file.endswith(f".dist-info/{name}")), b""
        )

    def required(self, name: str) -> Requirement:
        return next(requirement for requirement in self.requirements if requirement.name == name)


def nodes(wheel: Wheel) -> Iterator[ast.AST]:
    """All syntax of the wheel's modules."""
    for file, data in wheel.files.items():
        if file.endswith(".py"):
            yield from ast.walk(ast.parse(data))


def imports(wheel: Wheel) -> Iterator[str]:
    """The modules that are imported anywhere in the wheel, other than by a relative import."""
    for node in nodes(wheel):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wheel]:
    """The wheels of all packages, each built from its source distribution."""
    out = tmp_path_factory.mktemp("dist")
    uv, settings = checkout.find_uv()
    subprocess.run(
        [uv, "build", "--quiet", "--all-packages", "--out-dir", out],
        cwd=checkout.ROOT,
        env=settings,
        check=True,
    )
    built = [Wheel(path) for path in out.glob("*.whl")]
    return {canonicalize_name(wheel.metadata["Name"]): wheel for wheel in built}


def test_twine_check_passes(wheels: dict[str, Wheel]) -> None:
    """`twine check --strict`, for wheels and source distributions."""
    files = [
        file
        for wheel in wheels.values()
        for file in wheel.path.parent.iterdir()
        if file.name.endswith((".whl", ".gz"))
    ]
    files = sorted(set(files))
    assert len(files) == 2 * len(NAMES)
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == len(files)


def test_one_wheel_for_each_package(wheels: dict[str, Wheel]) -> None:
    assert sorted(wheels) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_wheel_is_pure_python(wheels: dict[str, Wheel], name: str) -> None:
    wheel = wheels[name]
    assert wheel.path.name.endswith("-py3-none-any.whl")
    assert b"Root-Is-Purelib: true" in wheel.dist_info("WHEEL")
    assert not [file for file in wheel.files if file.endswith((".so", ".o", ".pyc"))]


@pytest.mark.parametrize("name", NAMES)
def test_metadata_is_complete(wheels: dict[str, Wheel], name: str) -> None:
    wheel = wheels[name]
    assert wheel.metadata["License-Expression"] == "Apache-2.0"
    assert wheel.metadata.get_all("License-File") == ["LICENSE", "NOTICE"]
    for file in ("LICENSE", "NOTICE"):  # Each wheel is built from its source distribution.
        assert wheel.dist_info(f"licenses/{file}") == (checkout.ROOT / file).read_bytes()
    # The first version with PEP 639; not all indexes accept a later one.
    assert wheel.metadata["Metadata-Version"] == "2.4"
    urls = dict(url.split(", ") for url in wheel.metadata.get_all("Project-URL", []))
    assert urls == {
        "Homepage": REPOSITORY,
        "Documentation": f"{REPOSITORY}/tree/main/docs",
        "Source": f"{REPOSITORY}/tree/main/packages/{name}",
        "Changelog": f"{REPOSITORY}/blob/main/packages/{name}/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    }
    assert f"# {name}\n" in wheel.metadata.get_payload()
    # `verify` runs in the containers of NPU owners.
    oldest = "3.10" if name == "ascend-emulator" else "3.11"
    assert wheel.metadata["Requires-Python"] == f"<3.14,>={oldest}"


@pytest.mark.parametrize("name", sorted(set(NAMES) - {META}))
def test_wheel_holds_one_typed_module(wheels: dict[str, Wheel], name: str) -> None:
    wheel, module = wheels[name], name.replace("-", "_")
    tops = {file.split("/")[0] for file in wheel.files if ".dist-info/" not in file}
    # see ascend_platform/process/startup.py
    # and ascend_emulator/triton
    start_up = {"ascend-platform": "ascend_platform.pth", EMULATOR: START_UP}.get(name)
    assert tops == {module} | {start_up} - {None}
    assert f"{module}/py.typed" in wheel.files
    assert "Typing :: Typed" in wheel.metadata.get_all("Classifier", [])


@pytest.mark.parametrize("name", sorted(COMPONENTS | LIBRARIES))
def test_ranges_have_a_lower_and_an_upper_bound(wheels: dict[str, Wheel], name: str) -> None:
    """Siblings have the range of vLLM from ascend-platform, so that one file states it."""
    bounded = ["vllm", "torch-npu"] if name == "ascend-platform" else ["ascend-platform"]
    bounded += [each.name for each in wheels[name].requirements if each.name in LIBRARIES]
    for other in bounded:
        operators = sorted(
            specifier.operator for specifier in wheels[name].required(other).specifier
        )
        assert operators == ["<", ">="], f"{name} requires {wheels[name].required(other)}"
    family = {requirement.name for requirement in wheels[name].requirements} & {*NAMES, "vllm"}
    assert family - LIBRARIES == {"vllm" if name == "ascend-platform" else "ascend-platform"}


@pytest.mark.parametrize("name", sorted({*COMPONENTS, *LIBRARIES, EMULATOR}))
def test_imported_packages_are_required(wheels: dict[str, Wheel], name: str) -> None:
    """By the wheel itself, or by vLLM or torch-npu, which each wheel requires, some of them by way
    of ascend-platform."""
    required = {canonicalize_name(requirement.name) for requirement in wheels[name].requirements}
    for other in ("vllm", "torch-npu"):
        required |= {other} | {
            canonicalize_name(Requirement(each).name)
            for each in importlib.metadata.requires(other) or []
        }
    provided = importlib.metadata.packages_distributions()
    imported = (
        {module.partition(".")[0] for module in imports(wheels[name])}
        - sys.stdlib_module_names
        - {name.replace("-", "_")}
    )
    undeclared = {
        top
        for top in imported
        if not required & {canonicalize_name(each) for each in provided.get(top, [top])}
    }
    assert undeclared == NOT_REQUIRED.get(name, set())


@pytest.mark.parametrize("name", sorted(COMPONENTS - {"ascend-platform"}))
def test_stated_interface_version_has_the_names_that_are_used(
    wheels: dict[str, Wheel], name: str
) -> None:
    """Else the wheel would fail on the oldest ascend-platform that serves the stated version, whose
    names are recorded."""
    used, stated = set(), []
    for node in nodes(wheels[name]):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "extension":
            used.add(node.attr)
        if isinstance(node, ast.ImportFrom) and node.module == "ascend_platform.extension":
            used |= {alias.name for alias in node.names}
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "extension.join":
            stated += [
                ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg == "api"
            ]
    record = checkout.ROOT / "packages" / "ascend-platform" / "tests" / f"extension_{stated[0]}.txt"
    assert record.exists(), (
        f"{name} states version {stated[0]} of the interface, of which there is no record"
    )
    assert used - {re.split(r"\W", line)[0] for line in record.read_text().splitlines()} == set()


@pytest.mark.parametrize("name", sorted(COMPONENTS | LIBRARIES))
def test_ranges_admit_what_is_built_and_installed(wheels: dict[str, Wheel], name: str) -> None:
    if name != "ascend-platform":
        for each in wheels[name].requirements:
            if each.name in {"ascend-platform", *LIBRARIES}:
                assert wheels[each.name].metadata["Version"] in each.specifier
        return
    minors = tomllib.loads((checkout.TOOLS / "versions" / "compat.toml").read_text())
    tried = ["0.30.9", *(f"{minor}.0" for minor in minors), "0.99.0"]
    vllm = wheels[name].required("vllm").specifier
    assert [version for version in tried if version in vllm] == tried[1:-1]


def test_only_the_meta_package_has_exact_pins(wheels: dict[str, Wheel]) -> None:
    pins = {str(requirement) for requirement in wheels[META].requirements}
    versions = {name: wheel.metadata["Version"] for name, wheel in wheels.items()}
    assert pins == {f"{name}=={versions[name]}" for name in COMPONENTS | LIBRARIES} | {
        f'{EMULATOR}=={versions[EMULATOR]}; extra == "emulator"'
    }
    assert not [
        str(requirement)
        for name in NAMES
        if name != META
        for requirement in wheels[name].requirements
        if any(specifier.operator == "==" for specifier in requirement.specifier)
    ]
    subprocess.run(
        [sys.executable, checkout.TOOLS / "versions" / "pin_meta.py", "--check"], check=True
    )


def test_entry_points(wheels: dict[str, Wheel]) -> None:
    """Exactly one platform plugin, since vLLM refuses two, and no duplicate names, of which vLLM
    silently keeps one."""
    result = [
        (group, *item)
        for wheel in wheels.values()
        for group, points in wheel.entry_points.items()
        for item in points.items()
    ]
    # VLLM_PLUGINS is one list of names for all of vLLM's groups.
    names = [("vLLM" if group.startswith("vllm.") else group, name) for group, name, _ in result]
    assert len(names) == len(set(names))
    assert [group for group, *_ in result].count("vllm.platform_plugins") == 1
    general = sorted(name.replace("-", "_") for name in COMPONENTS - {"ascend-platform"})
    assert sorted(result) == sorted(
        [
            ("vllm.platform_plugins", "ascend", "ascend_platform:register"),
            *(("vllm.general_plugins", name, f"{name}:register") for name in general),
            (
                "vllm.general_plugins",
                "ascend_service_profiling",
                "ascend_cli.service_profiling:register",
            ),
            ("console_scripts", "vllm-ascend", "ascend_cli.main:main"),
            ("vllm_ascend.commands", "doctor", "ascend_cli.doctor:add"),
            ("vllm_ascend.commands", "plan", "ascend_cli.plan.command:add"),
            ("vllm_ascend.commands", "env", "ascend_cli.plugins:add_env"),
            ("vllm_ascend.commands", "plugins", "ascend_cli.plugins:add_plugins"),
            ("vllm_ascend.commands", "patches", "ascend_patches.cli:add"),
            ("vllm_ascend.diagnostics", "ascend_cli", "ascend_cli.diagnostics"),
            ("vllm_ascend.checks", "emulator", "ascend_emulator.doctor:check"),
            ("vllm_ascend.checks", "kv", "ascend_kv_connector.doctor:check"),
            ("vllm_ascend.checks", "patches", "ascend_patches.cli:examine"),
            ("vllm_ascend.scopes", "ascend_patches", "ascend_patches:enter"),
            ("vllm_ascend.overrides", "ascend_models", "ascend_models"),
            ("vllm_ascend.overrides", "ascend_patches", "ascend_patches.patches"),
            ("vllm_ascend.overrides", "ascend_quantization", "ascend_quantization"),
            ("console_scripts", "ascend-emulator", "ascend_emulator.cli:main"),
            ("pytest11", "ascend_emulator", "ascend_emulator.pytest_plugin"),
        ]
    )


def test_emulator_wheel_carries_its_sources_and_data(wheels: dict[str, Wheel]) -> None:
    source = checkout.ROOT / "packages" / EMULATOR / "src"
    needed = {
        str(path.relative_to(source)): path.read_bytes()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert any(file.endswith(".cpp") for file in needed)
    assert any(file.endswith(".toml") for file in needed)
    needed[START_UP] = (source.parent / START_UP).read_bytes()
    assert {
        file: data for file, data in wheels[EMULATOR].files.items() if ".dist-info/" not in file
    } == needed


def test_cli_and_emulator_have_the_same_laws(wheels: dict[str, Wheel]) -> None:
    """In the checkout the emulator's files are links."""
    theirs, ours = wheels["ascend-cli"].files, wheels[EMULATOR].files
    assert ours["ascend_emulator/law.py"] == theirs["ascend_cli/plan/law.py"]
    assert ours["ascend_emulator/fitted_laws.toml"] == theirs["ascend_cli/plan/laws.toml"]
