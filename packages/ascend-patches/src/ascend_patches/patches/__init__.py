"""The patches of this package, one file ``patch_<module>.py`` each; ``vllm-ascend patches new``
creates one."""
