from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_INT64: _ClassVar[DType]

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_RAW: _ClassVar[Codec]
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_INT64: DType
CODEC_UNSPECIFIED: Codec
CODEC_RAW: Codec

class Payload(_message.Message):
    __slots__ = ("version", "method", "job", "client", "classes", "descriptions", "classifier")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    CLASSIFIER_FIELD_NUMBER: _ClassVar[int]
    version: int
    method: str
    job: str
    client: str
    classes: _containers.RepeatedScalarFieldContainer[str]
    descriptions: Descriptions
    classifier: Classifier
    def __init__(self, version: _Optional[int] = ..., method: _Optional[str] = ..., job: _Optional[str] = ..., client: _Optional[str] = ..., classes: _Optional[_Iterable[str]] = ..., descriptions: _Optional[_Union[Descriptions, _Mapping]] = ..., classifier: _Optional[_Union[Classifier, _Mapping]] = ...) -> None: ...

class Descriptions(_message.Message):
    __slots__ = ("vectors",)
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    vectors: Tensor
    def __init__(self, vectors: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class Classifier(_message.Message):
    __slots__ = ("architecture", "state")
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    architecture: str
    state: _containers.RepeatedCompositeFieldContainer[Tensor]
    def __init__(self, architecture: _Optional[str] = ..., state: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "shape", "dtype", "codec", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: DType
    codec: Codec
    data: bytes
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[DType, str]] = ..., codec: _Optional[_Union[Codec, str]] = ..., data: _Optional[bytes] = ...) -> None: ...
