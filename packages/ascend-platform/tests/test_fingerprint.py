# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fingerprints."""

import pytest
from ascend_platform.fingerprint import fingerprint

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
    assert fingerprint(BASE, "A.f") == fingerprint(other, "A.f") != ""


@pytest.mark.parametrize(
    "change", [("1", "2"), ("None", "False"), ("or", "and"), ("f(self", "@g\n    def f(self")]
)
def test_other_code(change):
    other = BASE.replace(*change).replace("def @g\n    def", "@g\n    def")
    assert fingerprint(other, "A.f") not in ("", fingerprint(BASE, "A.f"))


def test_assignment_and_absence():
    assert fingerprint("x: int = 1", "x") != fingerprint("x: int = 2", "x") != ""
    assert fingerprint(BASE, "A.g") == fingerprint(BASE, "f") == ""


def test_same_in_every_version_of_python():
    # Recorded once, because ast.dump differs between Python 3.11, 3.12 and 3.13.
    assert fingerprint(BASE, "A.f") == "8b2911836a32"
