"""An HTTP server with OpenAI's API in front of the engine."""

from jaxkv.serve.http.api_keys import ApiKeys, parse_api_keys
from jaxkv.serve.http.app import application
from jaxkv.serve.http.connections import raise_descriptor_limit
from jaxkv.serve.http.drain import Drain
from jaxkv.serve.http.job import ServerConfig
from jaxkv.serve.http.listen import begin_listening, bind, make_server, url
from jaxkv.serve.http.logs import log_as

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
