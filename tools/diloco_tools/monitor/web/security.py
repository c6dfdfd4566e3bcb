"""Who may read and who may steer: host names, origins, the token, and the headers of every answer.

A page on any other site can make a browser send requests to this machine. Three rules keep it out:

    Host     must name this machine, so a foreign name that resolves to it (DNS rebinding) is refused
    Origin   where a browser sends one, or Sec-Fetch-Site, must be this page's own
    token    steering needs `Authorization: Bearer TOKEN`. For a page of another site browsers send that
             header only after a preflight request, which is refused; and cookies are not used

Reading needs the token too if the dashboard is bound to an address that other machines reach.
"""

import hmac
import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from diloco_protocol.addresses import is_loopback
from diloco_protocol.roles import Peer

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
EVERYWHERE = frozenset({"0.0.0.0", "::"})  # all addresses of this machine
OWN_SITE = frozenset({"same-origin", "none"})  # "none": typed into the address bar

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Refusal(Exception):
    """A refused request, with an HTTP status and a reason."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


def new_token() -> str:
    return secrets.token_urlsafe(32)  # 256 bits: too many to guess, so guesses are not limited


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


@dataclass(frozen=True)
class Policy:
    """The requests that this dashboard allows.

    Attributes:
        host: the address it is bound to.
        token: None matches no request.
        readonly: nothing may be changed.
        reader: the owner of its key, if that is not an operator's.
    """

    host: str
    token: str | None = None
    readonly: bool = False
    reader: Peer | None = None

    def of_request(self, headers: Mapping[str, str]) -> Refusal | None:
        """Rules for every request; `headers` by lower-case name."""
        name = _host_name(headers.get("host", ""))
        # Bound to all addresses: any IP address is accepted, a name might be another site's.
        is_ours = self.host in EVERYWHERE and _address(name) is not None
        if is_ours or name in LOOPBACK_NAMES or name == self.host.lower():
            return None
        return Refusal(
            421,
            f"Host header {name[:80]!r} is not allowed. Open the page as localhost, or at the address "
            "given with --host.",
        )

    def of_api(self, headers: Mapping[str, str]) -> Refusal | None:
        """Further rules for requests that read or change the run."""
        host = headers.get("host", "").lower()
        own = (f"http://{host}", f"https://{host}")
        origin = headers.get("origin")
        is_own = origin is None or origin.lower() in own
        if headers.get("sec-fetch-site", "none") not in OWN_SITE or not is_own:
            return Refusal(403, "Requests from pages of other sites are not allowed.")
        return None

    def of_reading(self, headers: Mapping[str, str]) -> Refusal | None:
        """On an address that other machines reach, reading needs the token too."""
        if is_loopback(self.host) or self._has_token(headers):
            return None
        return Refusal(
            401,
            "Other machines reach this dashboard, so reading needs its token too: open the address "
            "that it printed at its start.",
        )

    def of_steering(self, headers: Mapping[str, str]) -> Refusal | None:
        """Whether these headers may change the run."""
        if self.readonly:
            return Refusal(403, "Read-only: this dashboard was started with --readonly.")
        if self.reader is not None:
            return Refusal(
                403,
                f"Read-only: this dashboard has the key of {self.reader}. To steer the run, start one "
                "with an operator's key: diloco-dashboard --keys FILE.",
            )
        if self._has_token(headers):
            return None
        text = (
            "Wrong token: the dashboard has a new one after each start. Open the address that it "
            "printed, or enter the token."
            if "authorization" in headers
            else "Changing the run needs the token: open the address that the dashboard printed at "
            "its start, or enter the token."
        )
        return Refusal(401, text)

    def _has_token(self, headers: Mapping[str, str]) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if self.token is None or scheme.lower() != "bearer":
            return False
        # As bytes: compare_digest accepts only ASCII as text.
        return hmac.compare_digest(given.strip().encode(), self.token.encode())


def _host_name(header: str) -> str:
    """The host of a Host header, in lower case, without port and brackets; "" if it is invalid."""
    try:
        parts = urlsplit(f"//{header}")
        _ = parts.port  # raises where the port is not a number
        if parts.username is not None or parts.path or parts.query or parts.fragment:
            return ""
        return (parts.hostname or "").rstrip(".")
    except ValueError:
        return ""
