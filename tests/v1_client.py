"""A V1 client made from the .proto alone, as a stranger would make one: it shares no code with the daemon."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_tools import protoc

PROTO = Path(str(files("sidecar.gateway.proto"))) / "gubernator.proto"


@cache
def pool() -> descriptor_pool.DescriptorPool:
    """The .proto's descriptors, in a pool of their own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        assert protoc.main(["protoc", f"-I{PROTO.parent}", f"--descriptor_set_out={out}", PROTO.name]) == 0
        found = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    made = descriptor_pool.DescriptorPool()
    for file in found.file:
        made.Add(file)
    return made


class Stranger:
    """Calls V1 by the method's name.  target: as gRPC takes it, "host:port" or "unix:/path"."""

    def __init__(self, target: str, descriptors: descriptor_pool.DescriptorPool | None = None) -> None:
        self.channel = grpc.insecure_channel(target)
        self._service = (descriptors or pool()).FindServiceByName("pb.gubernator.V1")

    def method(self, name: str) -> tuple[Any, Any]:
        """The method to call, and the class of what it takes."""
        method = self._service.methods_by_name[name]
        asked = message_factory.GetMessageClass(method.input_type)
        answered = message_factory.GetMessageClass(method.output_type)
        path = f"/{self._service.full_name}/{name}"
        call = self.channel.unary_unary(
            path, request_serializer=asked.SerializeToString, response_deserializer=answered.FromString
        )
        return call, asked

    def call(self, name: str, timeout: float | None = 20.0, **fields: Any) -> Any:
        """The answer; raises grpc.RpcError."""
        call, asked = self.method(name)
        return call(json_format.ParseDict(fields, asked()), timeout=timeout)

    def ask(self, *requests: Mapping[str, Any], timeout: float | None = 20.0) -> Sequence[Any]:
        """The answers to requests, each a dict of the fields to set."""
        answers: Sequence[Any] = self.call("GetRateLimits", timeout, requests=list(requests)).responses
        return answers

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
