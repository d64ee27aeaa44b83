"""Message classes of `inference.proto`, made from its text: generated code would fit some versions of protobuf only."""

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

FILE = "inference.proto"
TOKEN = re.compile(r'"[^"]*"|[\w.]+|[^\s\w]')
COMMENT = re.compile(r"//.*")
SCALARS = {
    name: getattr(FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("double", "float", "int64", "uint64", "int32", "uint32", "bool", "string", "bytes")
}


def described(text: str, name: str = FILE) -> FileDescriptorProto:
    """Read the proto3 subset that `inference.proto` uses: messages, nested ones, oneofs, maps and unary methods."""
    file = FileDescriptorProto(name=name)
    tokens = iter(TOKEN.findall(COMMENT.sub("", text)))
    for token in tokens:
        match token:
            case "syntax":
                _expect(tokens, "=")
                file.syntax = next(tokens).strip('"')
                _expect(tokens, ";")
            case "package":
                file.package = next(tokens)
                _expect(tokens, ";")
            case "service":
                _service(tokens, file)
            case "message":
                _message(tokens, file.message_type.add(), f".{file.package}")
            case other:
                raise ValueError(f"{name}: {other!r}; expected syntax, package, service or message.")
    return file


def _expect(tokens: Iterator[str], *words: str) -> None:
    for word in words:
        if (token := next(tokens)) != word:
            raise ValueError(f"{token!r} came; expected {word!r}.")


def _service(tokens: Iterator[str], file: FileDescriptorProto) -> None:
    service = file.service.add(name=next(tokens))
    _expect(tokens, "{")
    while next(tokens) == "rpc":
        method = service.method.add(name=next(tokens))
        _expect(tokens, "(")
        method.input_type = f".{file.package}.{next(tokens)}"
        _expect(tokens, ")", "returns", "(")
        method.output_type = f".{file.package}.{next(tokens)}"
        _expect(tokens, ")", ";")


def _message(tokens: Iterator[str], message: DescriptorProto, scope: str) -> None:
    message.name = next(tokens)
    whole = f"{scope}.{message.name}"
    _expect(tokens, "{")
    for token in tokens:
        match token:
            case "}":
                return
            case "message":
                _message(tokens, message.nested_type.add(), whole)
            case "oneof":
                message.oneof_decl.add(name=next(tokens))
                _expect(tokens, "{")
                while (kind := next(tokens)) != "}":
                    _field(tokens, message, kind, whole).oneof_index = len(message.oneof_decl) - 1
            case "map":
                _map(tokens, message, whole)
            case "repeated":
                _field(tokens, message, next(tokens), whole).label = FieldDescriptorProto.LABEL_REPEATED
            case kind:
                _field(tokens, message, kind, whole)


def _field(tokens: Iterator[str], message: DescriptorProto, kind: str, scope: str) -> FieldDescriptorProto:
    field = message.field.add(name=next(tokens), label=FieldDescriptorProto.LABEL_OPTIONAL)
    _expect(tokens, "=")
    field.number = int(next(tokens))
    _expect(tokens, ";")
    if kind in SCALARS:
        field.type = SCALARS[kind]
    else:
        nested = any(one.name == kind for one in message.nested_type)
        package = scope.split(".")[1]
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f"{scope if nested else f'.{package}'}.{kind}"
    return field


def _map(tokens: Iterator[str], message: DescriptorProto, scope: str) -> None:
    """`map<string, VALUE> name = n;` is a repeated field of entries with a key and a value."""
    _expect(tokens, "<", "string", ",")
    value = next(tokens)
    _expect(tokens, ">")
    name = next(tokens)
    entry = message.nested_type.add(name="".join(word.capitalize() for word in name.split("_")) + "Entry")
    entry.options.map_entry = True
    whole = f"{scope}.{entry.name}"
    _field(iter(("key", "=", "1", ";")), entry, "string", whole)
    _field(iter(("value", "=", "2", ";")), entry, value, whole)
    _expect(tokens, "=")
    field = message.field.add(name=name, number=int(next(tokens)), label=FieldDescriptorProto.LABEL_REPEATED)
    field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, whole
    _expect(tokens, ";")


def _pool() -> DescriptorPool:
    """A pool of our own: in the default one, the stubs of Triton and KServe define the same names."""
    pool = DescriptorPool()
    pool.Add(described(files("dubito.service.grpc").joinpath(FILE).read_text()))
    for module in (health_pb2, reflection_pb2):  # so that reflection describes them too
        file = FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        pool.Add(file)
    return pool


POOL = _pool()
SERVICE = "inference.GRPCInferenceService"


def message_class(name: str) -> Any:
    """`ModelInferRequest` -> its class."""
    return GetMessageClass(POOL.FindMessageTypeByName(f"inference.{name}"))
