"""The engine over HTTP, as clients of OpenAI's API speak it."""

from jaxkv.server.app import application
from jaxkv.server.keys import read_keys
from jaxkv.server.listen import begin_listening, bind, server_of, url
from jaxkv.server.work import Terms

__all__ = ["Terms", "application", "begin_listening", "bind", "read_keys", "server_of", "url"]
