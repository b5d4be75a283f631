# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Errors in a report: their codes and one sentence, without paths, addresses, host names
or numbers of processes."""

from __future__ import annotations

import getpass
import re
import socket
from contextlib import suppress
from typing import Any

CODES = re.compile(r"\b(E[A-Z]\d{4}|ERR\d{5}|(?:10[07]|14[58]|20[07]|50[07]|161|361|561)\d{3})\b")
SENTENCE = re.compile(r"\bE[A-Z]\d{4}: .*|\[ascend-emulator\] .*")
# torch_npu's source file and line
PLACE = re.compile(r"^[\w():]+:(?:\.\./)*[\w./-]+\.(?:cpp|h):\d+ ")
LONGEST = 160
SCRUB = (
    (re.compile(r"\b0x[0-9a-fA-F]+\b"), "ADDRESS"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "ADDRESS"),
    (
        re.compile(
            r"\b(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{0,4}\b|\b(?:[0-9a-fA-F]{1,4})?::[0-9a-fA-F:]*[0-9a-fA-F]\b"
        ),
        "ADDRESS",
    ),
    (re.compile(r"(?<![\w.])~?(?:/[\w.+@-]+){2,}/?"), "PATH"),
    (re.compile(r"\b\d{4}-\d{2}-\d{2}[-T ]\d{2}:\d{2}:\d{2}[.\d:]*"), "TIME"),
    (re.compile(r"\b(?:PID|pid|tid|Process)\W{0,3}\d+"), "PROCESS"),
    (re.compile(r"\b\d{9,}\b"), "NUMBER"),
)


def private_words() -> list[str]:
    """This machine's name and user, which no report may have."""
    words = []
    with suppress(OSError):
        words += [socket.gethostname(), socket.gethostname().partition(".")[0]]
    with suppress(OSError, KeyError):
        words.append(getpass.getuser())
    return [word for word in words if len(word) > 3]


def scrubbed(text: str) -> str:
    """The text without anything that tells where it was written."""
    for pattern, word in SCRUB:
        text = pattern.sub(word, text)
    for word in private_words():
        text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "NAME", text)
    return " ".join(text.split())


def last_words(output: str) -> str:
    """The last line of a process's errors, before the emulator's summary."""
    lines = [line for line in output.splitlines() if not line.startswith("ascend-emulator: ")]
    return scrubbed("".join(lines[-1:]))


def described(error: BaseException) -> dict[str, Any]:
    """Type, CANN's codes and the most informative line of an exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # CANN's own words
    told = next((match[0] for match in map(SENTENCE.search, lines) if match), "")
    line = told or next((each for each in lines if "[ERROR]" not in each), "")
    line = PLACE.sub("", line)
    return {
        "type": type(error).__name__,
        "codes": sorted(set(CODES.findall(str(error)))),
        "message": scrubbed(line)[:LONGEST],
    }
