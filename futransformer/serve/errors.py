"""Errors in OpenAI's form: a status, and ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RETRY_SECONDS = 1  # a step takes milliseconds, so the queue moves within a second wherever it moves at all


class ApiError(Exception):
    """What a client did wrong, or what went wrong here, as the client is told it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """``kind`` is OpenAI's ``type``; ``param`` the field of the request that is meant."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON that a client reads, or the event that ends its stream."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be served as it stands (400)."""
    return ApiError(400, message, param=param, code=code)


def wrong_key() -> ApiError:
    """No API key, or another one (401)."""
    return ApiError(
        401,
        "wrong or missing API key: send it as 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def unknown_model(name: str, names: tuple[str, ...]) -> ApiError:
    """Another model than the one that is served (404)."""
    served = ", ".join(names)
    return ApiError(404, f"there is no model {name!r} here: ask for {served}", param="model", code="model_not_found")


def too_large(limit: int) -> ApiError:
    """A body beyond the limit (413); the connection is closed, for the rest of it is not read."""
    return ApiError(
        413,
        f"the request's body is larger than {limit} bytes",
        code="request_too_large",
        headers={"Connection": "close"},
    )


def queue_full(waiting: int) -> ApiError:
    """More requests than are let wait (429); OpenAI's client comes again by itself."""
    return ApiError(
        429,
        f"the queue is full ({waiting} sequences at work or waiting): try again later",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )


def failed(message: str) -> ApiError:
    """The engine broke while it computed this answer (500)."""
    return ApiError(500, message, kind="server_error", code="engine_failed")


def unavailable(message: str) -> ApiError:
    """A server that ends, or whose engine has broken (503)."""
    return ApiError(503, message, kind="server_error", code="unavailable")
