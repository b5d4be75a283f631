# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fingerprints."""

import ast

import pytest
from ascend_platform import fingerprint
from ascend_platform.overrides import table

BASE = "class A:\n    def f(self, x=None):\n        return x or [1, 'a']\n"


@pytest.mark.parametrize(
    "other",
    [
        (
            'class A:\n    "doc"\n    def f( self,x = None ):  # a comment\n        """Doc."""\n   '
            '     return (x or [1, "a",])\n'
        ),
        (
            "import os\nif 1:\n    class A:\n        def f(self, x=None):\n            return x or"
            " [1, 'a']\n    def f(): ...\n"
        ),
    ],
    ids=["written differently", "somewhere else"],
)
def test_same_code(other):
    assert fingerprint.fingerprint(BASE, "A.f") == fingerprint.fingerprint(other, "A.f") != ""


@pytest.mark.parametrize(
    "change", [("1", "2"), ("None", "False"), ("or", "and"), ("f(self", "@g\n    def f(self")]
)
def test_other_code(change):
    other = BASE.replace(*change).replace("def @g\n    def", "@g\n    def")
    assert fingerprint.fingerprint(other, "A.f") not in ("", fingerprint.fingerprint(BASE, "A.f"))


def test_assignment_and_absence():
    assert (
        fingerprint.fingerprint("x: int = 1", "x")
        != fingerprint.fingerprint("x: int = 2", "x")
        != ""
    )
    assert fingerprint.fingerprint(BASE, "A.g") == fingerprint.fingerprint(BASE, "f") == ""


def test_same_in_every_version_of_python():
    # Recorded once, because ast.dump differs between Python 3.11, 3.12 and 3.13.
    assert fingerprint.fingerprint(BASE, "A.f") == "8b2911836a32"


TEXT = '''
@first
@second(
    1
)
async def f(x=(
    1,
)):
    return """
f = 2
"""

class A:
    f = 3

    @property
    # Why.
    def g(self): return f

    def h(self):
        def g(): ...
        return g
'''


@pytest.mark.parametrize("name", ["f", "A", "A.f", "A.g", "A.h", "A.i", "first"])
@pytest.mark.parametrize("more", ["", "if 1:\n    def f(): ...\n", "async def f(): 'x'\n"])
def test_definition_is_that_of_the_whole_module(name, more):
    check_definition(TEXT + more, name)


def test_definitions_of_overrides_are_those_of_whole_modules():
    targets = {each for row in table.rows() for each in (row.target, row.compared) if each}
    targets |= {each for launch in table.launches() for each in (launch.kernel, launch.caller)}
    compared = 0
    for module, _, name in sorted(each.partition(":") for each in targets):
        if (source := fingerprint.module_source(module)) and not name.endswith(".*"):
            compared += check_definition(source, name)
    assert compared > 100


def check_definition(source, name):
    """Compare with a search of the whole tree; returns how many definitions there are."""
    expected = [fingerprint.parsed(source)]
    for each in name.split("."):
        expected = [actual for node in expected for actual in fingerprint._named(node, each)]
    actual = fingerprint.definitions(source, name)
    assert [ast.dump(node) for node in actual] == [ast.dump(node) for node in expected]
    return len(actual)
