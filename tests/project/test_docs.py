# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The documentation: generated tables are up to date, links resolve, and the site builds."""

import importlib.metadata
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from ascend_emulator import rules
from ascend_emulator.cann_names import public_names
from ascend_platform import extension
from harness import checkout

DOCS = checkout.ROOT / "docs"
TOOL = checkout.TOOLS / "docs-tables"
QUERIES = {
    "Qwen3-VL": "recipes/",
    "W8A8": "quantization/",
    "out of memory": "troubleshooting/",
    "310P": "compatibility/",
    "migration": "migration/",
    "kubernetes": "kubernetes/",
    "install": "installation/",
    "tool calling": "sampling/",
    "DeepSeek-V3.2": "recipes/",
    "gpt-oss": "recipes/",
    "two machines": "tutorial-several-machines/",
    "graph mode": "graph-mode/",
    "HCCL timeout": "troubleshooting/",
    "507018": "troubleshooting/",
    "ASCEND_RT_VISIBLE_DEVICES": "distributed-inference/",
    "Qwen3.5": "recipes/",
    "GLM-5": "recipes/",
    "Kimi-K2.5": "recipes/",
    "MXFP8": "quantization/",
    "KV cache fp8": "quantization/",
    "Ascend 950": "compatibility/",
    "NNAL": "installation/",
    "docker": "installation/",
    "torchvision": "troubleshooting/",
    "sleep mode": "sleep-mode/",
    "LoRA": "lora/",
    "speculative decoding": "speculative-decoding/",
    "prefill decode disaggregation": "kv-connector/",
    "multi-node": "multi-node/",
    "VLLM_PLUGINS": "plugins/",
    "emulator": "emulator/",
    "doctor": "doctor/",
}
"""Queries of readers, and the page that each should find first."""


def test_tables_are_those_of_the_code() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), "--check"], capture_output=True, text=True, check=False
    )
    # The set-up logs its steps if sources have changed since the last one.
    log = [
        line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("set-up [")
    ]
    assert (done.returncode, log) == (0, [])


def test_page_that_is_out_of_date_is_named_in_one_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin: chips -->\nold\n<!-- end: chips -->\nbehind\n")
    command = [sys.executable, str(TOOL), "--docs", str(tmp_path)]
    done = subprocess.run([*command, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "docs-tables: out of date: page.md; run tools/docs-tables\n",
    )
    assert "old" in page.read_text()
    subprocess.run(command, check=True)
    assert re.fullmatch(
        r"before\n<!-- begin: chips -->\n\n\| chip .*`Ascend910B1`.*\n\n<!-- end: chips"
        r" -->\nbehind\n",
        page.read_text(),
        re.DOTALL,
    )
    assert subprocess.run([*command, "--check"], check=False).returncode == 0


def test_every_table_is_on_a_page() -> None:
    names = re.findall(
        r'^    "([\w-]+)": .+,$', TOOL.read_text().partition("TABLES")[2], re.MULTILINE
    )
    assert len(names) > 5
    regions = [
        name
        for page in DOCS.rglob("*.md")
        for name in re.findall(r"^<!-- begin: (\S+) -->", page.read_text(), re.M)
    ]
    assert sorted(regions) == sorted(names)


def test_every_supported_vllm_has_run_without_failures() -> None:
    results = json.loads((checkout.TOOLS / "versions" / "compat.json").read_text())
    on_all = {f"tests/plugins/test_{name}.py" for name in ("compat", "plugins", "patches")}
    on_all |= {f"tests/e2e/test_{name}.py" for name in ("generation", "parallelism", "sleep")}
    assert list(results) == list(
        tomllib.loads((checkout.TOOLS / "versions" / "compat.toml").read_text())
    )
    for minor, result in results.items():
        assert result["versions"]["vllm"].startswith(f"{minor}.")
        assert on_all <= set(result["counts"]), minor
        assert all(
            counts["failed"] == 0 < counts["passed"] for counts in result["counts"].values()
        ), minor


def test_every_key_of_the_configuration_is_explained() -> None:
    page = (DOCS / "configuration.md").read_text()
    keys = re.findall(r"^\| `(ascend\.\S+)` \|", page, re.MULTILINE)
    assert keys
    assert [key for key in keys if f"### `{key}`" not in page] == []


def test_every_variable_of_the_emulator_is_explained() -> None:
    code = checkout.ROOT / "packages" / "ascend-emulator" / "src" / "ascend_emulator"
    files = [path for path in code.rglob("*") if path.suffix in {".py", ".cpp"}]
    used = {
        name
        for path in files
        for name in re.findall(r'"(ASCEND_EMULATOR_[A-Z_]+)"', path.read_text())
    }
    # How `ascend-emulator run` hands its own options to the libraries.
    internal = {
        f"ASCEND_EMULATOR_{name}"
        for name in ("CHIP", "CUSTOM", "LACKS", "LAWS", "MEMORY", "NPUS", "SOC", "WITHOUT")
    }
    page = (DOCS / "emulator-options.md").read_text()
    assert len(used) > 10
    assert {name for name in used - internal if f"`{name}" not in page} == set()


def build(config: Path, site: Path) -> tuple[int, str]:
    """Exit status and warnings of a strict build. (Not with --quiet: mkdocs counts the warnings
    that it logs.)"""
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(config),
        "--site-dir",
        str(site),
    ]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    return done.returncode, "\n".join(
        line for line in done.stderr.splitlines() if line.startswith(("WARNING", "ERROR"))
    )


def reference(site: Path, page: str) -> set[str]:
    """Names and commands that have a heading on a page, without what precedes them."""
    text = (site / page / "index.html").read_text()
    anchors = re.findall(r'<h[2-4] id="?([\w.-]+)', text)
    return {re.split(r"\.|(?:vllm-ascend|ascend-emulator)-", anchor)[-1] for anchor in anchors}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("site")
    assert build(checkout.ROOT / "mkdocs.yml", path) == (0, "")
    return path


def test_site_needs_no_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))  # One more page for missing addresses.
    element = re.compile(
        r'<(?:script|link(?![^>]*rel="?canonical)|img)[^>]+(?:src|href)="?(https?://[^">\s]+)'
    )
    loaded = {address for page in pages for address in element.findall(page.read_text())}
    assert loaded == set()
    # Material's script would ask for a sitemap.xml at each of these.
    assert [page for page in pages if re.search(r"<link rel=\"?alternate", page.read_text())] == []
    anchors = Counter(
        anchor
        for page in site.glob("emulator-rules/*/index.html")
        for anchor in re.findall(r'<a id="?([^\s">]+)', page.read_text())
    )
    assert anchors == Counter(rules.rules().keys())
    # Each rule has its limit or a link to its check, its source, and an example or a remark.
    text = "".join(page.read_text() for page in site.glob("emulator-rules/*/index.html"))
    assert len(re.findall(r"</strong>: <(?:code|a )", text)) == len(anchors)
    assert len(re.findall(r"<li>(?:broken by|no example)", text)) == len(anchors)
    assert set(extension.__all__) - reference(site, "api") == {"logger"}
    commands = reference(site, "commands/vllm-ascend")
    points = importlib.metadata.entry_points(group="vllm_ascend.commands")
    assert points.names <= commands
    assert {"run", "verify", "build"} <= reference(site, "commands/ascend-emulator")
    c_names = (site / "api-emulator-c" / "index.html").read_text()
    assert [name for name in public_names() if name not in c_names] == []
    assert {"ascend_emulator_prepare", "ascend_emulator_scalar"} <= reference(
        site, "api-emulator-c"
    )


def test_site_has_an_address_versions_and_languages(site: Path) -> None:
    english, chinese = (
        (site / page / "index.html").read_text() for page in ("installation", "zh/installation")
    )
    address = "https://vllm-ascend-all.github.io/vllm-ascend-all/"
    assert f'href="{address}installation/"' in english
    assert f"<loc>{address}installation/</loc>" in (site / "sitemap.xml").read_text()
    # The theme's script reads versions.json, which mike writes, only with this.
    assert '"version": {"provider": "mike"}' in english
    assert [re.findall(r'<html lang="?(\w+)', text) for text in (english, chinese)] == [
        ["en"],
        ["zh"],
    ]


def test_search_finds_the_page_that_readers_want(site: Path) -> None:
    """By the worker of the site's pages. All pages except two have to be the first result, and
    these among the first five."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("the site's search needs Node.js")
    command = [node, str(checkout.PROGRAMS / "search_site.mjs"), str(site)]
    done = subprocess.run(
        command, input=json.dumps(list(QUERIES)), capture_output=True, text=True, check=True
    )
    ranks = {}
    for (query, wanted), actual in zip(QUERIES.items(), json.loads(done.stdout), strict=True):
        pages = [location.partition("#")[0] for location in actual]
        ranks[query] = pages.index(wanted) + 1 if wanted in pages else None
    print(ranks)
    first = [query for query, rank in ranks.items() if rank == 1]
    assert len(QUERIES) > 30
    assert len(first) >= len(QUERIES) - 2, ranks
    assert all(rank is not None and rank <= 5 for rank in ranks.values()), ranks


@pytest.mark.parametrize(
    ("page", "text", "message"),
    [
        ("index.md", "[nowhere](nowhere.md)", "nowhere.md"),
        ("index.md", "[nowhere](installation.md#nowhere)", "#nowhere"),
        ("extra.md", "# Extra", 'not included in the "nav"'),
    ],
    ids=["link", "anchor", "page outside the navigation"],
)
def test_strict_build_finds(page: str, text: str, message: str, tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    settings = (checkout.ROOT / "mkdocs.yml").read_text()
    (tmp_path / "mkdocs.yml").write_text(
        re.sub(r" (?=(?:tools|packages)/)", f" {checkout.ROOT}/", settings)
    )
    with open(tmp_path / "docs" / page, "a") as file:
        file.write(f"\n{text}\n")
    status, messages = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert status == 1
    assert message in messages


def test_links_of_the_readmes_lead_to_files() -> None:
    for readme in [*checkout.ROOT.glob("README*.md"), *checkout.ROOT.glob("packages/*/README.md")]:
        text = readme.read_text()
        ours = "https://github.com/vllm-ascend-all/vllm-ascend-all/"
        targets = [readme.parent / link for link in re.findall(r"\]\((?!https?:)([^)#]+)", text)]
        targets += [
            checkout.ROOT / link
            for link in re.findall(rf"{ours}(?:blob|tree)/main/([^)#\s]+)", text)
        ]
        assert [target for target in targets if not target.exists()] == [], readme


def test_figures_of_the_readme_are_those_of_the_tables() -> None:
    """Its three bullets, and the width of a line. The Chinese README has the same figures."""
    readme = (checkout.ROOT / "README.md").read_text()
    assert max(map(len, readme.splitlines())) <= 100
    results = json.loads((checkout.TOOLS / "generated_docs" / "models.json").read_text()).values()
    right = Counter("inputs" in each for each in results if each["result"] == "right")
    page = (DOCS / "emulator-capability.md").read_text()
    (operators,) = re.findall(r"^\| operators \(aclnn\) \| (\d+) \|", page, re.MULTILINE)
    minors = list(json.loads((checkout.TOOLS / "versions" / "compat.json").read_text()))
    assert len(minors) == 3
    for text in (readme, (checkout.ROOT / "README.zh.md").read_text()):
        bullets = re.findall(r"^- .*(?:\n  .*)*", text.partition("\n## ")[0], re.MULTILINE)
        figures = [re.findall(r"\d+\.\d+|\d+", bullet) for bullet in bullets]
        assert figures[0][:2] == [str(right[False]), str(right[True])]
        assert figures[1] == [operators]
        assert figures[2] == [minors[0], minors[-1]]


def test_every_path_on_a_page_exists() -> None:
    """Paths of this repository, of a folder in it, or of a test file; not those with a part in
    capitals to be filled in."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=checkout.ROOT,
        capture_output=True,
        text=True,
    )
    there = {
        str(each)
        for line in listed.stdout.splitlines()
        for each in (Path(line), *Path(line).parents)
    }
    ends = {
        "/".join(Path(each).parts[-count:])
        for each in there
        for count in range(1, len(Path(each).parts) + 1)
    }
    pages = [
        *DOCS.glob("*.md"),
        *DOCS.glob("reports/*.md"),
        checkout.ROOT / "README.md",
        *checkout.ROOT.glob("packages/*/README.md"),
    ]
    named = re.compile(
        r"`((?:tests|tools|packages|docs|csrc|ascend_\w+)/[\w./-]+|test_\w+\.py)[ `]"
    )
    match = [
        (page.name, path)
        for page in pages
        for path in named.findall(page.read_text())
        if not re.search("[A-Z]{3}", path)
    ]
    assert len(match) > 50
    assert [(page, path) for page, path in match if path.rstrip("/.") not in ends] == []


def test_files_of_where_a_change_goes_exist() -> None:
    """Of the list of the development page: below ascend_platform, the checkout, or the package
    that the item names."""
    section = (
        (DOCS / "development.md")
        .read_text()
        .partition("## Where a change goes")[2]
        .partition("\n## ")[0]
    )
    named = re.findall(r"`([\w./-]+(?:/|\.(?:py|toml|csv)))`", section.partition("\n- ")[2])
    roots = [checkout.ROOT, *checkout.ROOT.glob("packages/*/src/*")]
    assert len(named) > 20
    missing = [path for path in named if not any((root / path).exists() for root in roots)]
    assert [path for path in missing if not re.search("[A-Z]{3}", path)] == []


def test_every_combination_of_the_components_is_on_its_page() -> None:
    """The page has the combinations of `tools/check wheels`; their names are derived here
    independently."""
    siblings = ["attention", "cli", "communicator", "kv-connector", "model-loader", "models"]
    siblings += ["patches", "quantization"]
    chosen = [each for size in range(3) for each in itertools.combinations(siblings, size)]
    expected = [" + ".join(("platform", *each)) for each in chosen] + ["all"]
    region = (
        (DOCS / "plugins.md")
        .read_text()
        .partition("<!-- matrix: begin -->")[2]
        .partition("<!-- matrix: end -->")[0]
    )
    rows = [
        [cell.strip() for cell in row[1:-1].split("|")]
        for row in region.split("\n")
        if row.startswith("|")
    ][2:]
    served = {row[0]: row[-1] for row in rows}
    assert list(served) == expected + [f"{each}, forced" for each in siblings]
    for name in expected:
        fused = "attention" in name or name == "all"
        assert served[name] == f"serves; attention {'fused' if fused else 'built-in'}"
