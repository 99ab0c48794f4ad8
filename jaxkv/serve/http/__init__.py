"""An HTTP server with OpenAI's API in front of the engine."""

from jaxkv.serve.http.access import ApiKeys, parse_api_keys
from jaxkv.serve.http.app import application
from jaxkv.serve.http.connections import raise_descriptor_limit
from jaxkv.serve.http.logs import log_as
from jaxkv.serve.http.server import (
    Drain,
    ServerConfig,
    begin_listening,
    bind,
    make_server,
    url,
)

__all__ = [
    "ApiKeys",
    "Drain",
    "ServerConfig",
    "application",
    "begin_listening",
    "bind",
    "log_as",
    "make_server",
    "parse_api_keys",
    "raise_descriptor_limit",
    "url",
]
