# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Contracts between wheels that have no base class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Diagnostics(Protocol):
    """Diagnostics of vLLM's processes: the object of the entry point of group
    ``vllm_ascend.diagnostics``, which may be a module."""

    def start_command(self) -> None:
        """One of vLLM's commands starts: called as Python starts, before anything is imported.

        It may end the process, if the command cannot serve.
        """
        ...

    def watch(self) -> None:
        """Watch for errors that end this process or its child processes.

        Called when the platform is registered in a process, and again each time that vLLM has
        configured its logging, which removes log handlers.
        """
        ...

    def read_reports(self) -> None:
        """Read what child processes have left in the directory of vLLM's sockets, which is about to
        be removed."""
        ...


class Experts(Protocol):
    """A rank's experts, applied to rows sorted by expert: what ``dispatch_and_combine`` of a
    communicator's all2all manager takes."""

    @property
    def takes_int8(self) -> bool:
        """Whether rows are int8, quantized by row with ``scale``."""
        ...

    def __call__(
        self, rows: torch.Tensor, counts: torch.Tensor, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The outputs ``[rows, hidden]`` in the model's dtype.

        Args:
            rows: ``[rows, hidden]`` in the model's dtype, or int8.
            counts: rows of each of the rank's experts, int64 ``[experts]``.
            scale: of int8 rows, float32 ``[rows]``; None for others.
        """
        ...
