"""Found by Python at start when this directory is on PYTHONPATH: gives vLLM's logger a handler before vLLM does.

vLLM 0.32 configures its logger only once its plugins are loaded (vllm/logger.py, configure_logging_from_args), and so loses
its own lines about them. Its configuration then replaces this handler.
"""

import logging

_handler = logging.StreamHandler()
_handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s", "%m-%d %H:%M:%S"))
logging.getLogger("vllm").addHandler(_handler)
logging.getLogger("vllm").setLevel(logging.INFO)
