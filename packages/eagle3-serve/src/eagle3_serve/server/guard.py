"""What is checked before a request reaches its endpoint: the API key and the size of the body."""

import secrets

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle3_serve.server.errors import ApiError

MAX_BODY_BYTES = 16 * 2**20


class Guard:
    """ASGI middleware: 401 without the key (everything under `/v1`), 413 for bodies too large."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] == "http" and not self._has_key(scope):
            error = ApiError(401, "a valid API key is required: Authorization: Bearer <key>")
            error.code = "invalid_api_key"
            headers = {"WWW-Authenticate": "Bearer"}
            await JSONResponse(error.body(), error.status, headers)(scope, receive, send)
        else:
            await self._app(scope, _limited(receive), send)

    def _has_key(self, scope: Scope) -> bool:
        if self._api_key is None or not scope["path"].startswith("/v1"):
            return True
        given = Headers(scope=scope).get("authorization", "")
        return secrets.compare_digest(given.encode(), f"Bearer {self._api_key}".encode())


def _limited(receive: Receive) -> Receive:
    """Count the body as it comes: a chunked one has no length to look at first."""
    size = 0

    async def counted() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        return message

    return counted
