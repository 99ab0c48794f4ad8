"""The routes, and the answers to all other requests."""

from __future__ import annotations

import logging
from functools import partial
from inspect import signature
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxkv import __version__
from jaxkv.errors import nearest
from jaxkv.serve.http.access import (
    METRICS,
    ApiKeys,
    CheckMiddleware,
    ConcurrencyLimit,
    check_host,
    check_key,
)
from jaxkv.serve.http.body import BodyReader, ParserThreads
from jaxkv.serve.http.completions import CompletionRoute, Reply
from jaxkv.serve.http.errors import (
    APIError,
    ErrorResponse,
    engine_unhealthy,
    server_failed,
    shown,
)
from jaxkv.serve.http.logs import ID, REQUEST_ID, AccessLogMiddleware
from jaxkv.serve.http.metrics import Metrics
from jaxkv.serve.http.protocols import EngineProtocol, LanguageProtocol
from jaxkv.serve.http.rates import RateLimits
from jaxkv.serve.http.request import ServedModel, parse_prompts, parse_text, parse_tokens
from jaxkv.serve.http.responses import CHAT, COMPLETION, RESPONSE
from jaxkv.serve.http.responses_reply import ResponsesReply
from jaxkv.serve.http.server import Drain, ServerConfig

LOG = logging.getLogger(__name__)


ROUTES = (
    ("/v1/completions", COMPLETION, Reply),
    ("/v1/chat/completions", CHAT, Reply),
    ("/v1/responses", RESPONSE, ResponsesReply),
)


def application(
    engine: EngineProtocol,
    language: LanguageProtocol,
    keys: ApiKeys | None = None,
    config: ServerConfig | None = None,
    drain: Drain | None = None,
) -> ASGIApp:
    """The ASGI application for an engine and a model's tokenizer.

    keys: the accepted API keys; without any, no key is needed. drain: refuses requests once begun.
    """
    config, keys, drain = config or ServerConfig(), keys or ApiKeys(), drain or Drain()
    served = ServedModel(engine, language, config)
    metrics = Metrics(engine.metrics, config.metrics_prefix)
    limit = ConcurrencyLimit(config.max_in_flight, config.max_per_key)
    bodies = BodyReader(config.max_bodies, config.max_body, config.read_seconds)
    shared = (served, metrics, limit, RateLimits(), bodies, ParserThreads(), drain)

    async def health(request: Request) -> Response:
        drain.check()
        if not engine.healthy:
            raise engine_unhealthy()
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        cards = [card(name, served) for name in served.names]
        return JSONResponse({"object": "list", "data": cards})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        if name not in served.names:
            raise served.unknown(name)
        return JSONResponse(card(name, served))

    async def prometheus(request: Request) -> Response:
        keys.check_admin(request.headers.get("authorization", ""))
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    app = Starlette(
        routes=[
            *post_routes(shared),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            Route("/health", health),
            Route(METRICS, prometheus),
            Route("/version", version),
        ],
        middleware=middleware(keys, config),
        exception_handlers={APIError: refuse, HTTPException: misdirect, Exception: fail},
    )
    app.router.redirect_slashes = False
    paths = {route.path for route in app.routes}
    return AccessLogMiddleware(app, metrics, paths, config.log_probes)


def post_routes(shared: tuple[Any, ...]) -> list[Route]:
    """The routes that take a prompt. shared: what all of them use."""
    routes = []
    for path, format, reply in ROUTES:
        route = CompletionRoute(format, *shared, reply)
        routes.append(Route(path, route, methods=["POST"]))
        conversions = {f"{path}/render": parse_prompts}
        if format is COMPLETION:
            conversions |= {"/tokenize": parse_tokens, "/detokenize": parse_text}
        for path, parse in conversions.items():
            routes.append(Route(path, partial(route.convert, parse), methods=["POST"]))
    return routes


def middleware(keys: ApiKeys, config: ServerConfig) -> list[Middleware]:
    """From the outermost on. Browsers ask for permission (CORS) without an API key."""
    origins = config.allowed_origins
    # A public page that asks a server on the user's machine needs one permission more. Older
    # versions of Starlette do not refuse it.
    private = {"allow_private_network": True}
    private = private if private.keys() <= signature(CORSMiddleware).parameters.keys() else {}
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["retry-after", ID],
        **private,
    )
    return [
        Middleware(CheckMiddleware, check=partial(check_host, keys, config.host, origins)),
        *([cors] if origins else []),
        Middleware(CheckMiddleware, check=partial(check_key, keys)),
    ]


def card(name: str, served: ServedModel) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": served.language.created,
        "owned_by": "jaxkv",
        "max_model_len": served.engine.max_len,
    }


async def refuse(request: Request, error: APIError) -> Response:
    return ErrorResponse(error)


async def misdirect(request: Request, error: HTTPException) -> Response:
    """Answer a request for an unknown route or method."""
    paths = [route.path for route in request.app.routes]
    near = nearest(request.url.path, paths)
    methods = (error.headers or {}).get("Allow", "")  # of a known path
    remedy = f"did you mean {near}?" if near else f"there are {', '.join(paths)}"
    remedy = f"it takes {', '.join(sorted(methods.split(', ')))}" if methods else remedy
    message = f"there is no {request.method} {shown(request.url.path)} here; {remedy}"
    reported = APIError(error.status_code, message)
    reported.headers.update(error.headers or {})
    return ErrorResponse(reported)


async def fail(request: Request, error: Exception) -> Response:
    """Answer after a bug of ours: status 500 to the client, the traceback to the log."""
    LOG.error("request %s failed", REQUEST_ID.get(), exc_info=error)
    return ErrorResponse(server_failed())
