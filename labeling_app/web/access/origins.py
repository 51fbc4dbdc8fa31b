"""Whether a request comes from the app's own pages."""


def is_own_origin(method: str, host: str, origin: str, fetch_site: str) -> bool:
    """Whether a request comes from the app's own pages, or changes nothing.

    Browsers send Origin or Sec-Fetch-Site with every request of another site that could change
    something; a program that sends neither cannot be tricked by a web page. Where Sec-Fetch-Site
    is sent (over https, and to localhost) it alone decides: no page can forge it, and behind a
    proxy that sends a Host of its own our own Origin would look like another site's.
    """
    if method in ("GET", "HEAD", "OPTIONS"):
        return True
    if fetch_site:
        return fetch_site in ("same-origin", "none")
    return not origin or host_of(origin) == host


def host_of(origin: str) -> str:
    """The host and port of an Origin; empty for "null"."""
    return origin.partition("://")[2]
