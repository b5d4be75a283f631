"""What torch.compile does to a model's graph: nothing. The pieces between its attentions run operator by operator."""

from typing import Any

from torch import fx
from vllm.compilation.passes.inductor_pass import InductorPass


class NoPasses(InductorPass):
    """In place of ``vllm.compilation.passes.pass_manager.PostGradPassManager``, whose passes make CUDA's operators."""

    def configure(self, config: Any) -> None:
        """Take vLLM's configuration, of which nothing is needed."""

    def add(self, pass_: InductorPass) -> None:
        """Refuse a pass of ``inductor_compile_config``: there is no Inductor that would run it.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"the pass {type(pass_).__name__} cannot run: Ascend NPUs compile without Inductor; leave it out")

    def __call__(self, graph: fx.Graph) -> None:
        """Leave the graph as it is."""
