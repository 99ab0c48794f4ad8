"""The routes, and the answers to all other requests."""

from __future__ import annotations

import logging
from inspect import signature

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
from jaxkv.serve.http.answers import Answers
from jaxkv.serve.http.api_keys import METRICS, APIKeyMiddleware, ApiKeys, ConcurrencyLimit
from jaxkv.serve.http.body import Bodies
from jaxkv.serve.http.body_parsers import BodyParsers
from jaxkv.serve.http.drain import Drain
from jaxkv.serve.http.faults import Fault, shown
from jaxkv.serve.http.formats import CHAT, COMPLETION
from jaxkv.serve.http.hosts import HostMiddleware
from jaxkv.serve.http.job import ServerConfig, unknown_model
from jaxkv.serve.http.logs import REQUEST_ID
from jaxkv.serve.http.metrics import Metrics
from jaxkv.serve.http.observer import ID, Observer
from jaxkv.serve.http.protocols import EngineProtocol, LanguageProtocol

LOG = logging.getLogger(__name__)


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
    names = (language.name, *config.aliases)
    metrics = Metrics(engine.metrics, config.metrics_prefix)
    limit = ConcurrencyLimit(config.max_in_flight, config.max_per_key)
    bodies = Bodies(config.max_bodies, config.max_body, config.read_seconds)
    parsers = BodyParsers()
    routes = []
    for path, format in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        answers = Answers(format, engine, language, config, metrics, limit, bodies, parsers, drain)
        for end, endpoint in (("", answers), ("/render", answers.render)):
            routes.append(Route(f"{path}{end}", endpoint, methods=["POST"]))

    async def health(request: Request) -> Response:
        drain.check()
        if not engine.healthy:
            raise Fault(503, "the engine does not answer; restart the server", "engine_unhealthy")
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        cards = [card(name, engine, language) for name in names]
        return JSONResponse({"object": "list", "data": cards})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        if name not in names:
            raise unknown_model(name, language)
        return JSONResponse(card(name, engine, language))

    async def prometheus(request: Request) -> Response:
        keys.check_admin(request.headers.get("authorization", ""))
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    app = Starlette(
        routes=[
            *routes,
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            Route("/health", health),
            Route(METRICS, prometheus),
            Route("/version", version),
        ],
        middleware=middleware(keys, config),
        exception_handlers={Fault: refuse, HTTPException: misdirect, Exception: fail},
    )
    app.router.redirect_slashes = False
    return Observer(app, metrics, config.log_probes)


def middleware(keys: ApiKeys, config: ServerConfig) -> list[Middleware]:
    """From the outermost on. Browsers ask for permission (CORS) without an API key."""
    origins = config.allowed_origins
    # A public page that asks a server on the user's machine needs one permission more. Older
    # versions of Starlette do not refuse it.
    private = {"allow_private_network": True}
    private = private if private.keys() <= signature(CORSMiddleware).parameters.keys() else {}
    cors = Middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"],
        allow_headers=["*"], expose_headers=["retry-after", ID], **private,
    )  # fmt: skip
    return [
        Middleware(HostMiddleware, keys=keys, host=config.host, origins=origins),
        *([cors] if origins else []),
        Middleware(APIKeyMiddleware, keys=keys),
    ]


def card(name: str, engine: EngineProtocol, language: LanguageProtocol) -> dict[str, object]:
    about = {"id": name, "object": "model", "created": language.created}
    return about | {"owned_by": "jaxkv", "max_model_len": engine.max_len}


async def refuse(request: Request, fault: Fault) -> Response:
    return fault.response()


async def misdirect(request: Request, error: HTTPException) -> Response:
    """Answer a request for an unknown route or method."""
    route = f"{request.method} {shown(request.url.path)}"
    fault = Fault(error.status_code, f"there is no {route} here; POST /v1/completions, for one")
    fault.headers.update(error.headers or {})
    return fault.response()


async def fail(request: Request, error: Exception) -> Response:
    """Answer after a bug of ours: status 500 to the client, the traceback to the log."""
    LOG.error("request %s failed", REQUEST_ID.get(), exc_info=error)
    return Fault(500, "the server failed; its standard error says why").response()
