"""This daemon as one of a Kubernetes Service's pods: what the settings and the downward API say of it.

Decides which variable says what, and what is done where one is missing.  Knows no API server and no slice.  The
variables are those that deploy/kubernetes/ puts into the pod: POD_IP, POD_IPS, POD_NAME, POD_NAMESPACE, POD_UID and
NODE_NAME.
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster_link.discovery.endpoints import Rules, address
from cluster_link.discovery.kubernetes import Kubernetes, Myself, connect_to
from cluster_link.discovery.source import Standing
from cluster_link.membership import Peer, parse_peers
from sidecar.config import UNIX, Config, ConfigError

_VARIABLES = {"uid": "POD_UID", "node": "NODE_NAME", "pod": "POD_NAME"}
"""Where a pod's name on the ring stands, by kubernetes_identity."""


def myself(config: Config, environ: Mapping[str, str]) -> Myself:
    """How this daemon knows itself among pods; raises ConfigError."""
    variable = _VARIABLES[config.kubernetes_identity]
    name = environ.get(variable, "")
    if not name:
        raise ConfigError(f"kubernetes_identity: {config.kubernetes_identity} needs the variable {variable}")
    if config.advertise:
        try:
            (peer,) = parse_peers(config.advertise)
        except ValueError as error:
            raise ConfigError(f"advertise: {error}") from None
        where = peer.address
    elif config.listen.startswith(UNIX):
        raise ConfigError("advertise: is needed where `listen` is a path, since peers call a host and a port")
    else:
        where = _at(environ.get("POD_IP", ""), config)
        if not where:
            raise ConfigError("advertise: needs a host:port where the variable POD_IP holds no IP address")
    others = (_at(ip.strip(), config) for ip in environ.get("POD_IPS", "").split(","))
    return Myself(Peer(name, where), environ.get("POD_UID", ""), frozenset({where, *others} - {""}))


def open_kubernetes(config: Config, standing: Standing, environ: Mapping[str, str]) -> Kubernetes:
    """The source that tells this daemon of its Service's pods; raises ConfigError."""
    namespace = config.kubernetes_namespace or environ.get("POD_NAMESPACE", "")
    if not namespace:
        raise ConfigError("kubernetes_namespace: is needed where the variable POD_NAMESPACE is missing")
    connect = connect_to(namespace, config.kubernetes_service, config.kubernetes_kubeconfig, environ)
    # Of a pod with two addresses, the family that this pod itself goes by: it is the one that its network prefers.
    ipv6 = ":" in environ.get("POD_IP", "")
    rules = Rules(config.kubernetes_port, config.kubernetes_identity, ipv6)
    return Kubernetes(connect, rules, myself(config, environ), standing)


def _at(ip: str, config: Config) -> str:
    return address(ip, int((config.advertise or config.listen).rpartition(":")[2])) or ""
