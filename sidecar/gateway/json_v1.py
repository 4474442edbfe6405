"""V1's messages as JSON: protobuf's own mapping, and for each mistake in a body the field that it is in.

Decides what a body may hold; the values are json_format's.  Stricter than that where it would guess: a field that V1
does not have, one given twice, and an enum's number too large for it are mistakes, not what the caller did not say.
"""

from __future__ import annotations

import json
import math
from typing import Any

from google.protobuf import json_format

from sidecar.gateway.mapping import check_count
from sidecar.gateway.proto.gubernator_pb2 import Algorithm, Behavior, GetRateLimitsReq, RateLimitReq

_FIELDS = {name: field for field in RateLimitReq.DESCRIPTOR.fields for name in (field.name, field.json_name)}
_TEXTS = ("name", "unique_key")
_ENUMS = {"algorithm": Algorithm.keys(), "behavior": Behavior.keys()}
_ENUM_MAX = 2**31 - 1
_REQUESTS = "requests"
_DIGITS = 20
"""Of a number of 64 bits, with its sign."""
_SHOWN = 80
"""Characters of an odd name that are told."""
_REFUSALS = (json_format.ParseError, ValueError, TypeError, RecursionError)


class BadBody(ValueError):
    """A body that is no request; the text names the field at fault."""


def requests_in(body: bytes) -> list[Any]:
    """The requests of a GetRateLimits body, not looked at yet; raises BadBody, TooManyRequests."""
    try:
        content = _read(body)
    except BadBody:
        raise
    except RecursionError:
        raise BadBody("field 'body' is nested too deep") from None
    except ValueError as error:
        raise BadBody(f"field 'body' is not JSON: {error}") from None
    if type(content) is not dict:
        raise BadBody("field 'body' must be an object with a field 'requests'")
    for name in content:
        if name != _REQUESTS:
            raise BadBody(f"field {_short(name)} is none of this call's; it has 'requests'")
    requests = content.get(_REQUESTS)
    if requests is None:
        return []
    if type(requests) is not list:
        raise BadBody("field 'requests' must be an array")
    check_count(len(requests))
    return requests


def add_request(asked: GetRateLimitsReq, place: int, request: Any) -> None:
    """Read the request at `place` of a body into `asked`; raises BadBody."""
    where = f"{_REQUESTS}[{place}]"
    if type(request) is not dict:
        raise BadBody(f"field '{where}' must be an object")
    seen = set()
    for name, value in request.items():
        field = _FIELDS.get(name)
        if field is None:
            raise BadBody(f"field {_short(f'{where}.{name}')} is none of a request's")
        if field.name in seen:
            raise BadBody(f"field '{where}.{name}' is given twice")
        seen.add(field.name)
        if field.name in _ENUMS and type(value) is not str and value is not None and not _is_enum_number(value):
            raise BadBody(f"field '{where}.{name}' {_wanted(field.name)}")
    try:
        json_format.ParseDict(request, asked.requests.add())
    except _REFUSALS:
        raise BadBody(_fault(where, request)) from None


def plain(message: Any) -> dict[str, Any]:
    """Any message of V1 as JSON's values: the proto's own names, defaults written out."""
    found: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found


def _read(body: bytes) -> Any:
    """What stands in a body; raises ValueError, RecursionError."""
    try:
        return json.loads(body, object_pairs_hook=_once)
    except (BadBody, json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        # An integer of more digits than Python reads.  As what no field takes it is found in its field.
        return json.loads(body, object_pairs_hook=_once, parse_int=_number)


def _number(digits: str) -> float:
    return int(digits) if len(digits) <= _DIGITS else math.inf


def _short(name: str) -> str:
    """A name that a body made up, as far as an error needs it."""
    return repr(name[:_SHOWN])


def _is_enum_number(value: object) -> bool:
    return type(value) is int and -_ENUM_MAX - 1 <= value <= _ENUM_MAX


def _fault(where: str, request: dict[str, Any]) -> str:
    """Which field of a request json_format refused."""
    for name, value in request.items():
        try:
            json_format.ParseDict({name: value}, RateLimitReq())
        except _REFUSALS:
            return f"field '{where}.{name}' {_wanted(_FIELDS[name].name)}"
    return f"field '{where}' is no request"


def _wanted(name: str) -> str:
    if name in _TEXTS:
        return "must be a string of valid Unicode"
    if name in _ENUMS:
        return f"must be one of {', '.join(_ENUMS[name])}, or an integer of 32 bits"
    if name == "metadata":
        return "must be an object of strings"
    return "must be an integer of 64 bits, as a number or a string"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's fields, none of them twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadBody(f"field {_short(twice)} is given twice")
    return found
