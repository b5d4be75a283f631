# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Options of the model loader that stream a checkpoint's files."""

from typing import Any

STREAMS: dict[str, dict[str, Any]] = {
    name + (", pinned" if pinned else ""): {"strategies": ["stream"], "stream": stream}
    | ({"stream_pinned": True} if pinned else {})
    for name, stream in (("threads", "multithread"), ("runai_streamer", "runai_streamer"))
    for pinned in (False, True)
}
"""Options by the name of the way."""
