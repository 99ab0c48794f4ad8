"""An HTTP server with OpenAI's API in front of the engine."""

from jaxkv.server.api_keys import ApiKeys, parse_api_keys
from jaxkv.server.app import application
from jaxkv.server.connections import raise_descriptor_limit
from jaxkv.server.drain import Drain
from jaxkv.server.job import ServerConfig
from jaxkv.server.listen import begin_listening, bind, make_server, url
from jaxkv.server.logs import log_as

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
