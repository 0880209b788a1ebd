"""Memory for transitions: pure stores. Empty until its issue is built."""

__all__: list[str] = []
