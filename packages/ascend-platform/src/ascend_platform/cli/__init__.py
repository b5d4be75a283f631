"""The command ``vllm-ascend`` and its subcommands."""
