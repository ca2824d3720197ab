"""The web application: addresses, and the protection of its pages.

The page only reads, and only answers GET. What it shows comes from run folders, which may hold
anything: every text is sanitized and escaped, no link is followed, the pages run no script but
`static/live.js`, and a report runs none at all.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from osfl.run_folder.observation import ObservedRun
from osfl.run_folder.report.template import STYLE
from osfl.ui.pages import Pages
from osfl.ui.stream import stream_sections

STATIC = Path(__file__).parent / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
# A report has its pictures and style inside; without `allow-scripts` a sandbox runs no script
REPORT_POLICY = (
    "sandbox; default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
# A browser shows a picture in a page of its own making, which has inline styles
PICTURE_POLICY = "sandbox; default-src 'none'; img-src 'self'; style-src 'unsafe-inline'"
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
# Sides of pictures in pixels, of which a page shows the first and links to the second
SIDES = {"small": 128, "large": 1024}


class SecurityHeaders:
    """Middleware that adds `HEADERS` to every response that does not set its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def create_app(
    root: Path, hosts: Sequence[str], is_ending: Callable[[], bool] = lambda: False
) -> Starlette:
    """Create the application.

    Args:
        root: the folder of the runs.
        hosts: the names that a request's Host header may have. A web site that makes its own name
            resolve to this machine (DNS rebinding) is refused by it.
        is_ending: whether the server is ending, which ends the event streams.
    """
    pages = Pages(root)
    streams = partial(_events, pages, is_ending)
    routes = [
        Route("/", pages.runs),
        Route("/events", streams),
        Route("/compare", pages.comparison),
        Route("/runs/{run}", pages.run),
        Route("/runs/{run}/events", streams),
        Route("/runs/{run}/report", partial(_report, pages)),
        Route("/runs/{run}/pictures/{size}/{file:path}", partial(_picture, pages)),
        Route("/static/style.css", _style),
        Route("/static/live.js", _script),
        Route("/static/icon.svg", _icon),
        # Where browsers look for the icon of a report or a picture
        Route("/favicon.ico", _icon),
    ]
    middleware = [
        Middleware(SecurityHeaders),
        Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False),
    ]
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: pages.problem},
    )


async def _events(pages: Pages, is_ending: Callable[[], bool], request: Request) -> Response:
    """Stream the sections of the list of runs, or of a run."""
    name = request.path_params.get("run")
    live = pages.live_runs() if name is None else pages.live_run(name)
    return StreamingResponse(stream_sections(live, is_ending), media_type="text/event-stream")


def _report(pages: Pages, request: Request) -> Response:
    content = _run(pages, request).report()
    if content is None:
        raise HTTPException(404, "this run has no report yet")
    headers = {"content-security-policy": REPORT_POLICY}
    return Response(content, media_type="text/html", headers=headers)


def _picture(pages: Pages, request: Request) -> Response:
    size = request.path_params["size"]
    file = request.path_params["file"]
    run = _run(pages, request)
    content = run.picture(file, SIDES[size]) if size in SIDES else None
    if content is None:
        raise HTTPException(404, "there is no such picture")
    # The address has the image's version
    headers = {
        "content-security-policy": PICTURE_POLICY,
        "cache-control": "private, max-age=86400",
    }
    return Response(content, media_type="image/png", headers=headers)


def _run(pages: Pages, request: Request) -> ObservedRun:
    return pages.observed(request.path_params["run"])


def _style(request: Request) -> Response:
    """Serve the report's style, followed by the page's own."""
    return Response(STYLE + (STATIC / "page.css").read_text(), media_type="text/css")


def _script(request: Request) -> Response:
    return FileResponse(STATIC / "live.js", media_type="text/javascript")


def _icon(request: Request) -> Response:
    # The sandbox of a report and of a picture has no origin
    headers = {"cross-origin-resource-policy": "cross-origin"}
    return FileResponse(STATIC / "icon.svg", media_type="image/svg+xml", headers=headers)
