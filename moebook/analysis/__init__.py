"""What a model does: where its routers send tokens, whether representations cluster."""

__all__ = [
    "clusters",
    "routers",
    "routing",
]
