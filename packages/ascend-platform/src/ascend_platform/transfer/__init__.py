"""What wheels that move data between instances share: secret, identity of weights, messages,
engines, memory, queues of peers.

Like :mod:`ascend_platform.extension`, whose version it has, this package may be imported by other
wheels.
"""
