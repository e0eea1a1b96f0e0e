"""Bodies of errors, in the format of the API that a path belongs to: OpenAI's or Anthropic's."""

from __future__ import annotations

from typing import Any

from tidemill.core.errors import ApiError

MESSAGES = "/v1/messages"  # Anthropic's API; every other path is of OpenAI's
RESPONSES = "/v1/responses"
_OPENAI = {401: "authentication_error", 404: "not_found_error"}
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """The JSON body of an error on this path."""
    status, usual = error.status, "invalid_request_error"
    if path.startswith(MESSAGES):
        kind = _ANTHROPIC.get(status, usual if status < 500 else "api_error")
        full = error.code == "context_length_exceeded"  # by these words, clients know that they should compact
        return {"type": "error", "error": {"type": kind, "message": f"prompt is too long: {error}" if full else str(error)}}
    kind = _OPENAI.get(status, usual if status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def error_event(path: str, error: ApiError) -> dict[str, Any]:
    """An error in the middle of a stream of events, whose status is sent already."""
    if path.startswith(RESPONSES):
        return {"type": "error", "code": error.code or "server_error", "message": str(error), "param": error.param}
    return error_body(path, error)
