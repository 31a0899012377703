"""The OpenAI-compatible HTTP server."""

from eagle3_serve.server.app import ServerOptions, create_app
from eagle3_serve.server.run import listen, run
from eagle3_serve.server.worker import EngineWorker

__all__ = ["EngineWorker", "ServerOptions", "create_app", "listen", "run"]
