"""Facts and code that the wheels which move data between instances share: secrets, and identity of weights.

Like :mod:`ascend_platform.extension`, whose version it has, this package may be imported by other wheels.
"""
