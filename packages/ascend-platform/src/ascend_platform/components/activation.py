"""Whether this process has activated the platform, for messages."""

NOT_ACTIVATED = "Ascend platform not activated"

reason: str | None = None
"""Why the platform is not activated; "" if it is, None before the first call of ``ascend_platform.register``."""
