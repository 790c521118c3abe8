"""The routes."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from kvcore.server.answer import Answer
from kvcore.server.errors import ApiError
from kvcore.server.guard import Guard, error_response
from kvcore.server.health import health
from kvcore.server.metrics import CONTENT_TYPE
from kvcore.server.prepare import Plan, plan_chat, plan_completion, plan_native
from kvcore.server.schema import ChatRequest, CompletionRequest, NativeRequest, parse
from kvcore.server.served import Served
from kvcore.server.state import ServerState
from kvcore.server.subscription import STREAM_BUFFER, Subscription
from kvcore.version import __version__

Body = TypeVar("Body", bound=BaseModel)
_PAGE = {"chat.js": "text/javascript; charset=utf-8", "chat.css": "text/css; charset=utf-8"}
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)


def create_app(state: ServerState) -> FastAPI:
    """The ASGI application over ``state``, whose model may still be loading."""

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.post("/v1/chat/completions")
    @app.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _answer(state, request, ChatRequest, plan_chat)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(state, request, CompletionRequest, plan_completion)

    @app.post("/completion")
    @app.post("/completions")
    async def completion(request: Request) -> Response:
        return await _answer(state, request, NativeRequest, plan_native)

    @app.get("/v1/models")
    @app.get("/models")
    async def models() -> Response:
        served = state.ready()
        return JSONResponse({"object": "list", "data": [_model(served, name) for name in served.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        served = state.ready()
        if not served.knows(name):
            raise ApiError(404, f"the model {name[:200]!r} does not exist", "model", "model_not_found")
        return JSONResponse(_model(served, name))

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health_page() -> Response:
        body = health(state)
        return JSONResponse(body, 200 if body["status"] == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.api_route("/", methods=["GET", "HEAD"])
    async def page() -> Response:
        headers = {"Content-Security-Policy": _PAGE_POLICY, "Referrer-Policy": "no-referrer"}
        return Response(_asset("index.html"), headers=headers, media_type="text/html; charset=utf-8")

    @app.get("/page/{name}")
    async def asset(name: str) -> Response:
        if name not in _PAGE:
            raise ApiError(404, "there is no such page", code="not_found")
        return Response(_asset(name), media_type=_PAGE[name])

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        request.scope["kvcore.record"].fail(error)
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        words = {404: "there is no such path; docs/server.md lists them", 405: "this path takes another method"}
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        message = words.get(error.status_code, str(error.detail))
        failure = ApiError(error.status_code, message, code=code, headers=dict(error.headers or {}))
        request.scope["kvcore.record"].fail(failure)
        return error_response(failure)

    app.add_middleware(Guard, state=state)
    if state.settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(state.settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


async def _answer(
    state: ServerState, request: Request, schema: type[Body], plan_of: Callable[[Body, Served], Plan]
) -> Response:
    """Parse and tokenize away from the event loop, submit, and answer as the pieces come."""
    served = state.ready()
    data = await _read(request, state.settings.max_body)
    plan = await run_in_threadpool(lambda: plan_of(parse(schema, data), served))
    served = state.ready()  # it may have begun to stop meanwhile
    record = request.scope["kvcore.record"]
    record.stream = plan.stream
    subscription = Subscription(served.engine, plan.requests, STREAM_BUFFER if plan.stream else None)
    subscription.submit(plan.prompt_param)
    return Answer(plan, served, subscription, record, open_answers=state.open, keep_alive=state.settings.keep_alive)


async def _read(request: Request, limit: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > limit:
            raise too_large
    return bytes(data)


def _model(served: Served, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "kvcore",
        "max_model_len": served.max_model_len,
    }


def _asset(name: str) -> bytes:
    return (files("kvcore.server") / "page" / name).read_bytes()
