"""The EndpointSlices of one Service, asked for through the official Kubernetes client.

Decides which credentials are used and how long the server may be silent, and turns what the client raises into one
kind of trouble.  Knows nothing of what the answers say.

Loaded and used by the discovery's own thread only: the import takes 0.3 s and 22 MiB.  The client's Watch and informer
are left alone: they wait for a half-open connection for ever, and hang on to a version that is gone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import urllib3
from kubernetes.client.api.discovery_v1_api import DiscoveryV1Api
from kubernetes.client.api_client import ApiClient
from kubernetes.client.configuration import Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from kubernetes.config.incluster_config import SERVICE_CERT_FILENAME, SERVICE_TOKEN_FILENAME, InClusterConfigLoader
from kubernetes.config.kube_config import load_kube_config
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError, ReadTimeoutError

from cluster_link.discovery.connections import Connections
from cluster_link.discovery.reflector import Answer, Trouble

_CONNECT, _SILENT = 3.0, 90.0
"""Seconds to connect, and without a byte: a server sends a bookmark about every 60."""
_LIST_SILENT = 15.0
"""Seconds that a list may keep us waiting for its next byte."""
_LONGEST_RETRY_AFTER = 9
"""Digits."""


class KubeApi:
    """The slices of `service` in `namespace`; raises Trouble where credentials cannot be had.

    kubeconfig: a file; "" for a pod's own token and CA, whose paths are `token` and `ca` and whose server is named by
    KUBERNETES_SERVICE_HOST and _PORT in environ.
    connections: told of each connection.
    """

    def __init__(
        self,
        namespace: str,
        service: str,
        kubeconfig: str,
        environ: Mapping[str, str] = os.environ,
        connections: Connections | None = None,
        token: str = SERVICE_TOKEN_FILENAME,
        ca: str = SERVICE_CERT_FILENAME,
    ) -> None:
        settings = Configuration()
        load: Any = load_kube_config
        in_cluster: Any = InClusterConfigLoader
        try:
            if kubeconfig:
                load(config_file=kubeconfig, client_configuration=settings)
            else:
                in_cluster(token_filename=token, cert_filename=ca, environ=environ).load_and_set(settings)
            settings.retries = 0  # when to try again is the reflector's to say
            client = ApiClient(settings)
        except (ConfigException, OSError, ValueError, urllib3.exceptions.HTTPError) as error:
            raise Trouble(f"credentials: {_line(error)}", renew=True) from None
        except Exception as error:  # a parser's own, by what stands in a kubeconfig
            raise Trouble(f"credentials: {type(error).__name__}: {_line(error)}", renew=True) from None
        client.rest_client.pool_manager.pool_classes_by_scheme = _pools((connections or Connections()).made)
        self._list: Any = DiscoveryV1Api(client).list_namespaced_endpoint_slice
        self._scope: dict[str, Any] = {
            "namespace": namespace,
            "label_selector": f"kubernetes.io/service-name={service}",
            "_preload_content": False,
        }

    def list(self, version: str | None) -> Answer:
        """See reflector.Api."""
        return self._ask(resource_version=version, _request_timeout=(_CONNECT, _LIST_SILENT))

    def watch(self, version: str, seconds: int) -> Answer:
        """See reflector.Api."""
        return self._ask(
            resource_version=version,
            watch=True,
            allow_watch_bookmarks=True,
            timeout_seconds=seconds,
            _request_timeout=(_CONNECT, _SILENT),
        )

    def _ask(self, **how: Any) -> Answer:
        try:
            return KubeAnswer(self._list(**self._scope, **how))
        except ReadTimeoutError:
            raise Trouble("it took a request and is silent") from None
        except ApiException as error:
            if error.status:
                return Refusal(error)
            raise _unreachable(error) from None
        except (HTTPError, ConfigException, OSError, ValueError) as error:
            raise _unreachable(error) from None


class Refusal:
    """See reflector.Answer; the client has read it and let go of its connection."""

    def __init__(self, error: Any) -> None:
        self.status: int = error.status
        self.after = _retry_after(error.headers)
        self._body = error.body

    def pieces(self) -> Iterator[bytes]:
        """See reflector.Answer."""
        body = self._body or b""
        yield body if isinstance(body, bytes) else str(body).encode()

    def close(self) -> None:
        """See reflector.Answer."""


class KubeAnswer:
    """See reflector.Answer."""

    def __init__(self, response: Any) -> None:
        self._response = response
        self.status: int = response.status
        self.after = _retry_after(response.headers)

    def pieces(self) -> Iterator[bytes]:
        """See reflector.Answer."""
        response = self._response
        try:
            if response.chunked:
                yield from response.stream(65_536)
            else:
                while piece := response.read1(65_536):
                    yield piece
        except ReadTimeoutError:
            raise Trouble("silent in the midst of an answer") from None
        except (HTTPError, OSError, ValueError) as error:
            raise Trouble(f"cut off: {_line(error)}") from None

    def close(self) -> None:
        """See reflector.Answer."""
        if self._response.isclosed():
            self._response.release_conn()
        else:
            self._response.close()  # what is left in it would be taken for the next one's beginning


def _pools(made: Callable[[socket.socket], None]) -> dict[str, type[HTTPConnectionPool]]:
    """urllib3's pools, whose connections are told of."""

    class Plain(HTTPConnection):
        def connect(self) -> None:
            super().connect()
            made(self.sock)

    class Secured(HTTPSConnection):
        def connect(self) -> None:
            super().connect()
            made(self.sock)

    class PlainPool(HTTPConnectionPool):
        ConnectionCls = Plain

    class SecuredPool(HTTPSConnectionPool):
        ConnectionCls = Secured

    return {"http": PlainPool, "https": SecuredPool}


def _retry_after(headers: Mapping[str, str] | None) -> float:
    given = (headers or {}).get("Retry-After", "")
    # The other form, a date, is not sent by this server, and would need its clock to agree with ours.
    return float(given) if given.isdecimal() and len(given) <= _LONGEST_RETRY_AFTER else 0.0


def _unreachable(error: Exception) -> Trouble:
    # It may come back with another CA.
    return Trouble(f"not reached: {_line(error)}", renew=True)


def _line(error: BaseException) -> str:
    """An error in one line; of urllib3's, the cause, without objects' addresses in memory."""
    cause = getattr(error, "reason", None)
    text = str(cause if isinstance(cause, BaseException) else error)
    _, found, end = text.partition(">: ")
    return " ".join((end if found else text).split())[:300]
