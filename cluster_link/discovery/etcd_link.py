"""One connection to one etcd server: the calls that finding peers takes, each with a deadline, and its words for what
went wrong.

Decides when a server counts as silent, when a token is asked for anew, and how a fault reads.  Knows no peer and no
key.  Our own calls on generated stubs, since the libraries there are (aetcd, etcd3) know one server, ask for a token
once and cannot ask a watch whether it lives; and since gRPC goes on dialling a closed channel while any call is known,
no call and no exception that knows one leaves this file.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import grpc
import grpc.aio

from cluster_link.discovery.etcd_keys import Pair
from cluster_link.discovery.proto import etcd_pb2 as pb
from cluster_link.discovery.proto import etcd_pb2_grpc as stubs
from cluster_link.errors import BadCredentials
from cluster_link.handshakes import explain

_T = TypeVar("_T")
_CHANNEL_OPTIONS = [
    # A thousand peers take 100 KiB; what others keep below the prefix may be larger.
    ("grpc.max_receive_message_length", 64 << 20),
    # How long one attempt to connect may take, whatever its name says; every call's deadline is no longer.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
]
_LONGEST_FILE = 1 << 20
_STALE = ("invalid auth token", "revision of auth store is old")
_NO_AUTH = "authentication is not enabled"
_LEADER = (("hasleader", "true"),)
"""Has a server that lost its cluster end a stream, instead of holding it without news."""
_HUNG_UP = (
    "it hung up: one side alone speaks TLS (etcd_ca), or it wants a certificate that it trusts (etcd_cert, etcd_key)"
)
_MEANS = (
    ("invalid user ID or password", "etcd_user or the password in etcd_password_file is wrong"),
    ("user name is empty", "etcd wants a user: set etcd_user and etcd_password_file"),
    ("permission denied", "etcd_user has no right to read and write below etcd_prefix"),
)


class EtcdError(Exception):
    """A call failed; the text is one line for operators.  stale: the token is valid no more."""

    def __init__(self, why: str, stale: bool = False) -> None:
        super().__init__(why)
        self.stale = stale


class Credentials(NamedTuple):
    """What a connection is opened with, in PEM; no ca: plain text, no user: without a token."""

    ca: bytes = b""
    cert: bytes = b""
    key: bytes = b""
    user: str = ""
    password: str = ""


class Files(NamedTuple):
    """Where credentials are read from: paths, "" where there is none, and the user's name."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = ""

    def read(self) -> Credentials:
        """What stands in the files now; raises BadCredentials."""
        ca, cert, key = (_content(f"etcd_{name}", getattr(self, name)) for name in ("ca", "cert", "key"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if ca:
                context.load_verify_locations(cadata=ca.decode("ascii", "ignore"))
        except (OSError, ValueError) as error:
            raise BadCredentials(f"etcd_ca: {self.ca}: has no certificate that can be used: {error}") from None
        try:
            if cert:
                context.load_cert_chain(self.cert, self.key, password=lambda: "")
        except OSError as error:
            raise BadCredentials(f"etcd_cert: {self.cert}: cannot be used with {self.key}: {error}") from None
        word = _content("etcd_password_file", self.password).removesuffix(b"\n").removesuffix(b"\r")
        try:
            password = word.decode()
        except UnicodeDecodeError:
            raise BadCredentials(f"etcd_password_file: {self.password}: is not UTF-8") from None
        if self.password and not password:
            raise BadCredentials(f"etcd_password_file: {self.password}: is empty")
        return Credentials(ca, cert, key, self.user, password)


class Change(NamedTuple):
    """One key put or, where `put` is None, deleted, at this revision of the store."""

    key: bytes
    revision: int
    put: Pair | None


class Link:
    """An open connection, while its context lasts.

    endpoint: host:port.  timeout: seconds that any answer may take.  All calls raise EtcdError.
    """

    def __init__(self, endpoint: str, credentials: Credentials, timeout: float) -> None:
        self._endpoint = endpoint
        self._credentials = credentials
        self._timeout = timeout
        self._token: tuple[tuple[str, str], ...] = ()

    async def __aenter__(self) -> Link:
        given = self._credentials
        if given.ca:
            tls = grpc.ssl_channel_credentials(given.ca, given.key or None, given.cert or None)
            self._channel = grpc.aio.secure_channel(self._endpoint, tls, options=_CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(self._endpoint, options=_CHANNEL_OPTIONS)
        self._kv = stubs.KVStub(self._channel)  # type: ignore[no-untyped-call]
        self._lease = stubs.LeaseStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            await self._log_in()
        except BaseException:
            await self._channel.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def list(self, span: tuple[bytes, bytes]) -> tuple[int, list[Pair]]:
        """All keys from the first to before the second, and the store's revision then."""
        answer = await self._ask(self._kv.Range, pb.RangeRequest(key=span[0], range_end=span[1]))
        return answer.header.revision, [_pair(found) for found in answer.kvs]

    async def grant(self, ttl: int) -> tuple[int, int]:
        """A new lease: its id, and its seconds, which may be more than were asked for."""
        answer = await self._ask(self._lease.LeaseGrant, pb.LeaseGrantRequest(TTL=ttl))
        if answer.error:
            raise EtcdError(f"no lease was granted: {answer.error}")
        return answer.ID, answer.TTL

    async def put(self, key: bytes, value: bytes, lease: int, revision: int) -> bool:
        """Put it under the lease if its last change is of that revision (0: it does not exist); whether it was."""
        unchanged = pb.Compare(result=pb.Compare.EQUAL, target=pb.Compare.MOD, key=key, mod_revision=revision)
        put = pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))
        answer = await self._ask(self._kv.Txn, pb.TxnRequest(compare=[unchanged], success=[put]))
        return bool(answer.succeeded)

    async def revoke(self, lease: int) -> None:
        """End a lease, and what lives under it."""
        await self._ask(self._lease.LeaseRevoke, pb.LeaseRevokeRequest(ID=lease))

    def keep_alive(self) -> KeepAlive:
        """The stream that renews leases."""
        return KeepAlive(self._lease.LeaseKeepAlive(metadata=_LEADER + self._token), self._timeout)

    def watch(self) -> Watch:
        """A stream of changes."""
        stub = stubs.WatchStub(self._channel)  # type: ignore[no-untyped-call]
        return Watch(stub.Watch(metadata=_LEADER + self._token), self._timeout)

    async def _ask(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return await self._once(method, request)
        except EtcdError as error:
            if not error.stale or not self._credentials.user:
                raise
        await self._log_in()
        return await self._once(method, request)

    async def _log_in(self) -> None:
        given = self._credentials
        if not given.user:
            return
        try:
            stub = stubs.AuthStub(self._channel)  # type: ignore[no-untyped-call]
            request = pb.AuthenticateRequest(name=given.user, password=given.password)
            self._token = ()
            answer = await self._once(stub.Authenticate, request)
        except EtcdError as error:
            if _NO_AUTH in str(error):  # a server that asks nobody needs no token
                return
            raise
        self._token = (("token", answer.token),)

    async def _once(self, method: Callable[..., Any], request: Any) -> Any:
        return await _told(lambda: method(request, metadata=self._token, timeout=self._timeout), None)


class _Stream:
    def __init__(self, call: Any, timeout: float) -> None:
        self._call = call
        self._timeout = timeout

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: object) -> None:
        call, self._call = self._call, None
        call.cancel()

    async def _write(self, message: Any) -> None:
        await _told(lambda: self._call.write(message), self._timeout)

    async def _read(self, timeout: float | None) -> Any:
        answer = await _told(lambda: self._call.read(), timeout)
        if answer is grpc.aio.EOF:
            raise EtcdError("it closed the stream")
        return answer


class KeepAlive(_Stream):
    """Renews leases."""

    async def renew(self, lease: int) -> bool:
        """Whether there is such a lease; it then lasts its whole time from now."""
        await self._write(pb.LeaseKeepAliveRequest(ID=lease))
        answer = await self._read(self._timeout)
        return bool(answer.TTL > 0)


class Watch(_Stream):
    """Tells changes as they come."""

    async def begin(self, span: tuple[bytes, bytes]) -> None:
        """Have all changes of these keys told from now on.

        What is listed after this has returned misses none; to begin at a revision that was listed before would:
        etcd 3.4.23 was seen to lose a deletion whose own revision was compacted meanwhile.
        """
        create = pb.WatchCreateRequest(key=span[0], range_end=span[1])
        await self._write(pb.WatchRequest(create_request=create))
        answer = await self._read(self._timeout)
        if answer.canceled:
            raise EtcdError(_meaning(answer.cancel_reason or "it ended the watch"))

    async def follow(self, quiet: float, changed: Callable[[list[Change]], None]) -> None:
        """Call `changed` for whatever happens, and with nothing when the server was asked after `quiet` seconds without
        news, and answered.

        Ends only where the store no longer keeps what was to be told next: then the keys must be listed again.
        """
        reading: asyncio.Task[Any] | None = None
        wait, asked = quiet, False
        try:
            while True:
                # Waited for apart from the reading, which would end the stream if it were given up.
                reading = reading or asyncio.ensure_future(self._read(None))
                await asyncio.wait({reading}, timeout=wait)
                if not reading.done():
                    if asked:
                        raise EtcdError(f"no answer in {self._timeout:g} s")
                    await self._write(pb.WatchRequest(progress_request=pb.WatchProgressRequest()))
                    wait, asked = self._timeout, True
                    continue
                answer, reading = await reading, None
                wait, asked = quiet, False
                if answer.compact_revision:
                    return
                if answer.canceled:
                    raise EtcdError(_meaning(answer.cancel_reason or "it ended the watch"))
                changed([_change(event) for event in answer.events])
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)


def _content(setting: str, path: str) -> bytes:
    if not path:
        return b""
    try:
        if not os.path.isfile(path):  # a pipe would be waited for
            raise BadCredentials(f"{setting}: {path}: {'is no file' if os.path.exists(path) else 'is missing'}")
        with open(path, "rb") as file:
            content = file.read(_LONGEST_FILE + 1)
    except OSError as error:
        raise BadCredentials(f"{setting}: {path}: cannot be read: {error.strerror}") from None
    if len(content) > _LONGEST_FILE:
        raise BadCredentials(f"{setting}: {path}: has more than {_LONGEST_FILE} bytes")
    return content


async def _told(call: Callable[[], Awaitable[_T]], timeout: float | None) -> _T:
    """What the call gives; an EtcdError that knows nothing of the call, should it fail."""
    why, stale = "", False
    try:
        async with asyncio.timeout(timeout):
            return await call()
    except TimeoutError:
        why = f"no answer in {timeout:g} s"
    except grpc.aio.AioRpcError as error:
        detail = error.details() or error.code().name
        stale = any(sign in detail for sign in _STALE)
        why = _meaning(detail)
    except asyncio.InvalidStateError:
        why = "the stream ended"
    except grpc.aio.UsageError as error:
        why = f"the stream ended: {error}"
    # Not raised above, where the exception that it comes from would be its context.
    raise EtcdError(why, stale)


def _meaning(why: str) -> str:
    plain = next((means for sign, means in _MEANS if sign in why), "")
    if not plain and "failed to connect" in why:
        # A connection that was in use may close for other reasons.
        hung_up = any(sign in why for sign in ("Secure read failed", "Handshake read failed", "Socket closed"))
        plain = _HUNG_UP if hung_up else explain(why, "etcd_ca")
    return f"{plain} ({why})" if plain else why


def _pair(found: Any) -> Pair:
    return Pair(found.key, found.value, found.mod_revision, found.lease)


def _change(event: Any) -> Change:
    return Change(event.kv.key, event.kv.mod_revision, _pair(event.kv) if event.type == pb.Event.PUT else None)
