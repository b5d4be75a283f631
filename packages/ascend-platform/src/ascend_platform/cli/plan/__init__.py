"""The command ``vllm-ascend plan``: which parallel layouts a model can have on given NPUs, and an
estimate of what each does."""
