"""The routes, and what is said where none of them answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxkv import __version__
from jaxkv.server.answers import Answers
from jaxkv.server.faults import Fault, shown
from jaxkv.server.keys import Door, Guard, Tenant
from jaxkv.server.language import Engine, Language
from jaxkv.server.metrics import Metrics
from jaxkv.server.shapes import CHAT, COMPLETION
from jaxkv.server.work import Terms, unknown_model

LOG = logging.getLogger(__name__)
READERS = 2  # bodies that become prompts at a time


def application(
    engine: Engine, language: Language, tenants: Sequence[Tenant] = (), terms: Terms | None = None
) -> Starlette:
    """An engine and a model's words as an ASGI application.

    tenants: who may ask; without any, everybody may.
    """
    terms = terms or Terms()
    metrics, door = Metrics(engine.figures), Door(terms.in_hand, terms.each)
    readers = ThreadPoolExecutor(READERS, "jaxkv-read")
    answers = {
        shape: Answers(shape, engine, language, terms, metrics, door, readers)
        for shape in (COMPLETION, CHAT)
    }

    async def health(request: Request) -> Response:
        if not engine.healthy:
            raise Fault(503, "the engine does not answer; start the server again")
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [card(engine, language)]})

    async def model(request: Request) -> Response:
        if request.path_params["model"] != language.name:
            raise unknown_model(request.path_params["model"], language)
        return JSONResponse(card(engine, language))

    async def figures(request: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    app = Starlette(
        routes=[
            Route("/v1/completions", answers[COMPLETION], methods=["POST"]),
            Route("/v1/chat/completions", answers[CHAT], methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            Route("/health", health),
            Route("/metrics", figures),
            Route("/version", version),
        ],
        middleware=[Middleware(Guard, tenants=tenants)],
        exception_handlers={Fault: refuse, HTTPException: misdirect, Exception: fail},
    )
    app.router.redirect_slashes = False
    return app


def card(engine: Engine, language: Language) -> dict[str, object]:
    told = {"id": language.name, "object": "model", "created": language.created}
    return told | {"owned_by": "jaxkv", "max_model_len": engine.room}


async def refuse(request: Request, fault: Fault) -> Response:
    return fault.response()


async def misdirect(request: Request, error: HTTPException) -> Response:
    """No such route, or not with this method."""
    asked = f"{request.method} {shown(request.url.path)}"
    fault = Fault(error.status_code, f"there is no {asked} here; POST /v1/completions, for one")
    fault.headers.update(error.headers or {})
    return fault.response()


async def fail(request: Request, error: Exception) -> Response:
    """A bug of ours: it is told apart from a refusal, and in full where only the owner reads."""
    LOG.error("a request failed", exc_info=error)
    return Fault(500, "the server failed; what it says on standard error tells us why").response()
