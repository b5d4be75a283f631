"""vLLM's V2 model runner on NPUs, without Triton; chosen by
``ascend_platform/config/model_runner.py``."""
