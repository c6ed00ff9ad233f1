"""Replicas of Penstock by Ray Serve, for a model that fits one machine: each replica owns one engine.

    serve run penstock.integrations.ray_serve:app
    serve run penstock.integrations.ray_serve:build model=/models/llama tensor_parallel_size=2

`deployment` is for a module of one's own. Names are loaded when they are used: Serve's proxies import the router alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.integrations.ray_serve.application import app, build, deployment

__all__ = ["app", "build", "deployment"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from penstock.integrations.ray_serve import application

    return getattr(application, name)
