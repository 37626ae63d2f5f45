"""Who may ask the dashboard, request by request, and what its addresses may contain."""

from __future__ import annotations

import socket

import pytest

from raydist.dashboard.access import AccessPolicy
from raydist.dashboard.views import RunView, form, parse
from raydist.errors import UsageError

ACCESS = AccessPolicy("127.0.0.1", 8275)
OWN = {"Host": "127.0.0.1:8275"}


@pytest.mark.parametrize(
    "headers",
    [
        OWN,
        {"Host": "localhost:9000"},  # an SSH tunnel
        {"Host": "[::1]:8275"},
        {"Host": f"{socket.gethostname()}:8275"},
        {**OWN, "Origin": "http://127.0.0.1:8275", "Sec-Fetch-Site": "same-origin"},
        {**OWN, "Origin": "https://127.0.0.1:8275", "Sec-Fetch-Site": "same-origin"},  # behind a proxy with TLS
        {**OWN, "Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
        {
            **OWN,
            "Sec-Fetch-Site": "cross-site",
            "Sec-Fetch-Mode": "navigate",
            "Sec-Fetch-Dest": "document",
        },  # a link in a mail
    ],
)
def test_a_request_of_this_host_and_page_passes(headers: dict[str, str]) -> None:
    """By number or own name, through a tunnel, from its own page, or by a link."""
    assert ACCESS.refused("GET", headers) is None


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("POST", OWN),
        ("OPTIONS", OWN),
        ("GET", {}),
        ("GET", {"Host": "evil.example:8275"}),
        ("GET", {"Host": "127.0.0.1.evil.example"}),
        ("GET", {"Host": "[::1"}),
        ("GET", {**OWN, "Origin": "http://evil.example"}),
        ("GET", {**OWN, "Origin": "http://127.0.0.1:9999"}),
        ("GET", {**OWN, "Origin": "null"}),
        ("GET", {**OWN, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}),
        ("GET", {**OWN, "Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}),
        ("GET", {**OWN, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}),
    ],
)
def test_a_request_of_another_site_is_refused(method: str, headers: dict[str, str]) -> None:
    """Other methods, foreign names (DNS rebinding), other origins and ports, images, fetches and frames of other pages."""
    assert ACCESS.refused(method, headers)


@pytest.mark.parametrize(
    "host",
    [
        "me@127.0.0.1:8275", "evil.example@localhost", "127.0.0.1.", "localhost.", "127.0.0.1/x", "127.0.0.1?x", "127.0.0.1#x",
        "127.0.0.1\\x", "127.0.0.1,evil.example", "127.0.0.1:8275:1", "127.0.0.1:x", "localhost\n", "", ":8275", "[]",
        "[localhost]", "[127.0.0.1%eth0]", "0x7f000001", "2130706433", "127.1", "١٢٧.0.0.1",
    ],
)  # fmt: skip
def test_a_host_is_a_name_or_number_and_a_port(host: str) -> None:
    """Nothing else, although a parser of addresses would find this host's name in it."""
    assert ACCESS.refused("GET", {"Host": host}) == "the name in the address is not one of this host"


@pytest.mark.parametrize("body", [{"Content-Length": "1"}, {"Transfer-Encoding": "chunked", "Content-Length": "0"}])
def test_a_request_with_a_body_is_refused(body: dict[str, str]) -> None:
    """Another request could hide in it; also where actions are allowed, which need none."""
    for method in ("GET", "POST"):
        refused = AccessPolicy("127.0.0.1", 8275, acts=True).refused(
            method, {**OWN, "Origin": "http://127.0.0.1:8275", **body}
        )
        assert refused == "requests to this server have no body"


def test_the_token_is_random_and_not_shown() -> None:
    """256 bits, another one for each server; it stands in the address and the cookie only."""
    other = AccessPolicy("127.0.0.1", 8275)
    assert other.token != ACCESS.token
    assert len(ACCESS.token) >= 43
    assert ACCESS.token not in repr(ACCESS)
    assert ACCESS.url().endswith(f"/?token={ACCESS.token}")
    assert [ACCESS.knows(one) for one in (ACCESS.token, other.token, "", None, "é", "\udce9")] == [True, *[False] * 5]
    assert ACCESS.set_cookie().split("; ")[1:] == ["HttpOnly", "SameSite=Strict", "Path=/"]


def test_a_view_is_its_address() -> None:
    """Empty fields are defaults; the form shows what was asked."""
    assert parse({"first": "", "last": "", "smooth": "", "y": "", "with": "", "rank": ""}) == RunView()
    view = parse({"first": "10", "last": "500", "smooth": "20", "y": "log", "with": "a, b,,a", "rank": "3"})
    assert view == RunView(10, 500, 20, "log", ("a", "b"), 3)
    shown = form(view)
    assert [f'value="{value}"' in shown for value in ("10", "500", "20", "a, b", "3")] == [True] * 5
    assert 'value="log" selected' in shown


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ({"first": "-1"}, "first"),
        ({"first": "0"}, "first"),
        ({"last": "1e3"}, "last"),
        ({"last": "٣"}, "last"),
        ({"smooth": "9" * 5000}, "smooth"),
        ({"rank": "x"}, "rank"),
        ({"rank": "0" * 5000}, "rank"),
        ({"y": "cubic"}, "y"),
        ({"first": "5", "last": "4"}, "last"),
        ({"with": "a,b,c,d,e,f"}, "with"),
    ],
)
def test_a_view_that_makes_no_sense_names_its_field(query: dict[str, str], named: str) -> None:
    """One error, which says what to give."""
    with pytest.raises(UsageError, match=f"^{named}: ") as caught:
        parse(query)
    assert caught.value.hint
