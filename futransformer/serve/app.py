"""The routes: completions, chat, models, health and metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from futransformer.serve.errors import ApiError, refused, unknown_model
from futransformer.serve.limits import Limits
from futransformer.serve.metrics import Metrics
from futransformer.serve.protocol import ChatRequest, CompletionRequest
from futransformer.serve.service import Service

EXPECTED = "Input should be "  # what pydantic says of a wrong type or value
PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"})


def create_app(service: Service, metrics: Metrics) -> ASGIApp:
    """The application, with its limits before it."""
    app = FastAPI(title="FuTransformer", docs_url=None, redoc_url=None, openapi_url=None)
    settings, runner = service.settings, service.runner
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "futransformer",
            "max_model_len": service.max_model_len,
        }

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.complete(body, request.receive)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await service.chat(body, request.receive)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in settings.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name not in settings.names:
            raise unknown_model(name, settings.names)
        return card(name)

    @app.get("/health")
    async def health() -> dict[str, str]:
        runner.check()
        return {"status": "ok"}

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.exception_handler(ApiError)
    async def told(_: Request, error: ApiError) -> Response:
        return _response(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        return _response(_of_validation(error))

    @app.exception_handler(HTTPException)
    async def unrouted(_: Request, error: HTTPException) -> Response:
        return _response(ApiError(error.status_code, str(error.detail), headers=error.headers))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        message = f"the server failed: {type(error).__name__}"
        return _response(ApiError(500, message, kind="server_error", code="internal_error"))

    return Limits(app, settings, metrics, PATHS)


def _response(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


def _of_validation(error: RequestValidationError) -> ApiError:
    """The first fault that pydantic found, by its place in the request."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return refused(f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    place = _place(first["loc"])
    if not place:
        return refused("the body is a JSON object, sent as Content-Type: application/json")
    faults = dict.fromkeys(other["msg"] for other in error.errors() if _place(other["loc"]) == place)
    expected = [fault.removeprefix(EXPECTED) for fault in faults]
    if all(fault.startswith(EXPECTED) for fault in faults):
        return refused(f"{place} should be {' or '.join(expected)}", place)
    return refused(f"{place}: {first['msg']}", place)


def _place(steps: Sequence[str | int]) -> str:
    """A field's name, as messages[0].content; which of its forms pydantic tried (str, list[int]) is left out."""
    place = ""
    for step in steps[1:]:
        if isinstance(step, int):
            place += f"[{step}]"
        elif step == "str" or "[" in step:
            break
        else:
            place += f".{step}" if place else step
    return place
