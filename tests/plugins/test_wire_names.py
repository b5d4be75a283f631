# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Messages between engines have the names of their classes on the wire, and their fields those of
the attributes."""

from collections.abc import Iterator

import pytest
from ascend_communicator import hccl_sender
from ascend_kv_connector.p2p import protocol
from ascend_model_loader import wire
from ascend_transfer import messages


def subclasses(base: type) -> Iterator[type]:
    for each in base.__subclasses__():
        yield each
        yield from subclasses(each)


@pytest.mark.parametrize(
    "message",
    [*subclasses(messages.Message), *subclasses(wire.Message)],
    ids=lambda message: f"{message.__module__}.{message.__name__}",
)
def test_names_on_the_wire_are_those_of_the_code(message: type) -> None:
    assert message.__struct_config__.tag == message.__name__
    assert message.__struct_encode_fields__ == message.__struct_fields__


def test_every_protocol_is_checked() -> None:
    modules = {each.__module__ for each in subclasses(messages.Message)}
    assert {protocol.__name__, hccl_sender.__name__, messages.__name__} <= modules
    assert len([*subclasses(wire.Message)]) > 5
