# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Circles of a graph: modules that import each other, or files that include each other."""

from collections.abc import Collection, Mapping


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Groups of nodes each of which reaches all others of its group.

    Args:
        graph: the nodes to which each node has an edge, all of which are keys themselves.
    """
    reached: dict[str, set[str]] = {}
    for start in graph:
        waiting, reached[start] = [start], set()
        while waiting:
            fresh = {*graph[waiting.pop()]} - reached[start]
            reached[start] |= fresh
            waiting += fresh
    groups = {
        tuple(sorted(node for node in reached[start] if start in reached[node]))
        for start in graph
        if start in reached[start]
    }
    return [list(group) for group in sorted(groups)]
