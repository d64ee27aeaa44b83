"""Errors of requests, with the HTTP status and text that a client sees; they contain no paths and no tracebacks."""

from http import HTTPStatus

from dubito.models.errors import DubitoError, InputError, PredictionError

FAILED = "the model failed on this request; the server's log has the reason under this request's id."


class Problem(DubitoError):
    """An error with its HTTP status; `reason` is its label in the metrics."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None, reason: str = "") -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers, self.reason = status, detail, headers or {}, reason

    @property
    def title(self) -> str:
        return HTTPStatus(self.status).phrase


class TooManyRequests(Problem):
    """429, with the seconds to wait in Retry-After."""

    def __init__(self, detail: str, wait: float = 1.0, reason: str = "queue_full") -> None:
        super().__init__(429, detail, {"Retry-After": str(max(1, round(wait)))}, reason)


class Overloaded(TooManyRequests):
    """The queue of a model is full."""

    def __init__(self, queued: int, limit: int, wait: float) -> None:
        detail = f"{queued:,} rows times samples are under way, of at most {limit:,}; try again in {wait:.1f} s."
        super().__init__(detail, wait)


class Crowded(TooManyRequests):
    """The queue of a model has room, but is too long for a deadline."""

    def __init__(self, seconds: float, wait: float) -> None:
        detail = f"about {wait:.3f} s would pass before this request is begun, which has {max(0.0, seconds):.3f} s"
        super().__init__(f"{detail}; try again later, or with a longer timeout_ms.", wait, "deadline")


class Late(Problem):
    """The deadline passed before the answer was there."""

    def __init__(self, seconds: float, detail: str = "") -> None:
        usual = f"no answer within {seconds:.3f} s of queue and compute; ask for fewer samples or a longer timeout_ms."
        super().__init__(504, detail or usual, reason="deadline")


class Hopeless(Late):
    """The answer cannot be there before the deadline, so it is not begun."""

    def __init__(self, seconds: float, needed: float) -> None:
        takes = f"no answer within {seconds:.3f} s is possible: this request takes about {needed:.1f} s"
        super().__init__(seconds, f"{takes}; ask for fewer inputs or samples, or a longer timeout_ms.")


class Gone(Problem):
    """The model is being unloaded, or its loop has died."""

    def __init__(self) -> None:
        super().__init__(503, "the model is going away; ask again.", {"Retry-After": "1"}, "gone")


def problem_of(error: BaseException) -> Problem:
    """The problem to show to the client for any error."""
    match error:
        case Problem():
            return error
        case InputError():
            return Problem(400, str(error))
        case PredictionError():
            return Problem(422, str(error))
        case _:
            return Problem(500, FAILED)
