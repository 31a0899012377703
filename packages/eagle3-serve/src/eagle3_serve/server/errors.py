"""Errors as OpenAI clients expect them: `{"error": {message, type, param, code}}`."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException


class ApiError(Exception):
    """A refusal with an HTTP status; `param` names the request field at fault.

    `retry_after`: seconds after which another try makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def install_error_handlers(app: FastAPI) -> None:
    """Give every failure the same shape, the framework's own included."""

    @app.exception_handler(ApiError)
    def api_error(_: Request, error: ApiError) -> JSONResponse:
        after = error.retry_after
        headers = None if after is None else {"Retry-After": str(after)}
        return JSONResponse(error.body(), error.status, headers)

    @app.exception_handler(RequestValidationError)
    def validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        return api_error(_, _from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{message}: {request.method} {request.url.path}"
        elif error.status_code == 400:  # the framework's, which says no more than that
            message = "the body cannot be read as JSON"
        response = api_error(request, ApiError(error.status_code, message))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    def internal_error(_: Request, error: Exception) -> JSONResponse:
        # The server logs the traceback; clients get no internals.
        return api_error(_, ApiError(500, f"internal error: {type(error).__name__}"))


def _from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of the errors pydantic found, as one sentence that names the field."""
    error = errors[0]
    kind, context = error["type"], error.get("ctx", {})
    param = ".".join(str(part) for part in error["loc"][1:]) or None
    if kind == "json_invalid":
        return ApiError(
            400, f"the body is not JSON: {context['error']} at character {error['loc'][1]}"
        )
    if param is None and kind in ("missing", "model_attributes_type", "model_type"):
        return ApiError(400, "the body must be a JSON object, sent as application/json")
    if kind == "api_field":  # raised by our own validators, complete as it is
        return ApiError(400, error["msg"], param=context.get("param") or param)
    if kind == "extra_forbidden":
        return ApiError(400, f"{param}: unknown field", param=param)
    if kind == "missing":
        return ApiError(400, f"{param}: is required", param=param)
    found = repr(error.get("input"))
    found = found if len(found) <= 80 else found[:77] + "..."
    return ApiError(400, f"{param}: {error['msg']}, found {found}", param=param)
