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
    DTYPE_UINT8: _ClassVar[DType]

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_RAW: _ClassVar[Codec]
    CODEC_FLOAT16: _ClassVar[Codec]
    CODEC_INT8: _ClassVar[Codec]
    CODEC_INT4: _ClassVar[Codec]
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_INT64: DType
DTYPE_UINT8: DType
CODEC_UNSPECIFIED: Codec
CODEC_RAW: Codec
CODEC_FLOAT16: Codec
CODEC_INT8: Codec
CODEC_INT4: Codec

class Payload(_message.Message):
    __slots__ = ("version", "method", "job", "client", "classes", "descriptions", "classifier", "encodings", "mixtures", "captions", "embeddings", "concepts", "domain", "featurestatistics", "featuremixtures", "domainvector", "votes", "latentmixture", "latentstatistics", "joint", "masked")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    CLASSIFIER_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    MIXTURES_FIELD_NUMBER: _ClassVar[int]
    CAPTIONS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    CONCEPTS_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    FEATURESTATISTICS_FIELD_NUMBER: _ClassVar[int]
    FEATUREMIXTURES_FIELD_NUMBER: _ClassVar[int]
    DOMAINVECTOR_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    LATENTMIXTURE_FIELD_NUMBER: _ClassVar[int]
    LATENTSTATISTICS_FIELD_NUMBER: _ClassVar[int]
    JOINT_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    version: int
    method: str
    job: str
    client: str
    classes: _containers.RepeatedScalarFieldContainer[str]
    descriptions: Descriptions
    classifier: Classifier
    encodings: Encodings
    mixtures: Mixtures
    captions: Captions
    embeddings: Embeddings
    concepts: Concepts
    domain: Domain
    featurestatistics: FeatureStatistics
    featuremixtures: FeatureMixtures
    domainvector: DomainVector
    votes: Votes
    latentmixture: LatentMixture
    latentstatistics: LatentStatistics
    joint: Joint
    masked: Masked
    def __init__(self, version: _Optional[int] = ..., method: _Optional[str] = ..., job: _Optional[str] = ..., client: _Optional[str] = ..., classes: _Optional[_Iterable[str]] = ..., descriptions: _Optional[_Union[Descriptions, _Mapping]] = ..., classifier: _Optional[_Union[Classifier, _Mapping]] = ..., encodings: _Optional[_Union[Encodings, _Mapping]] = ..., mixtures: _Optional[_Union[Mixtures, _Mapping]] = ..., captions: _Optional[_Union[Captions, _Mapping]] = ..., embeddings: _Optional[_Union[Embeddings, _Mapping]] = ..., concepts: _Optional[_Union[Concepts, _Mapping]] = ..., domain: _Optional[_Union[Domain, _Mapping]] = ..., featurestatistics: _Optional[_Union[FeatureStatistics, _Mapping]] = ..., featuremixtures: _Optional[_Union[FeatureMixtures, _Mapping]] = ..., domainvector: _Optional[_Union[DomainVector, _Mapping]] = ..., votes: _Optional[_Union[Votes, _Mapping]] = ..., latentmixture: _Optional[_Union[LatentMixture, _Mapping]] = ..., latentstatistics: _Optional[_Union[LatentStatistics, _Mapping]] = ..., joint: _Optional[_Union[Joint, _Mapping]] = ..., masked: _Optional[_Union[Masked, _Mapping]] = ...) -> None: ...

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

class Encodings(_message.Message):
    __slots__ = ("vectors",)
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    vectors: Tensor
    def __init__(self, vectors: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class Mixtures(_message.Message):
    __slots__ = ("conditions", "weights", "component_weights", "component_means", "component_variances")
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_MEANS_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_VARIANCES_FIELD_NUMBER: _ClassVar[int]
    conditions: Tensor
    weights: Tensor
    component_weights: Tensor
    component_means: Tensor
    component_variances: Tensor
    def __init__(self, conditions: _Optional[_Union[Tensor, _Mapping]] = ..., weights: _Optional[_Union[Tensor, _Mapping]] = ..., component_weights: _Optional[_Union[Tensor, _Mapping]] = ..., component_means: _Optional[_Union[Tensor, _Mapping]] = ..., component_variances: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class LatentMixture(_message.Message):
    __slots__ = ("weights", "means", "variances")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    MEANS_FIELD_NUMBER: _ClassVar[int]
    VARIANCES_FIELD_NUMBER: _ClassVar[int]
    weights: Tensor
    means: Tensor
    variances: Tensor
    def __init__(self, weights: _Optional[_Union[Tensor, _Mapping]] = ..., means: _Optional[_Union[Tensor, _Mapping]] = ..., variances: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class LatentStatistics(_message.Message):
    __slots__ = ("counts", "sums", "squares")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    SQUARES_FIELD_NUMBER: _ClassVar[int]
    counts: Tensor
    sums: Tensor
    squares: Tensor
    def __init__(self, counts: _Optional[_Union[Tensor, _Mapping]] = ..., sums: _Optional[_Union[Tensor, _Mapping]] = ..., squares: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class Captions(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedCompositeFieldContainer[Texts]
    def __init__(self, texts: _Optional[_Iterable[_Union[Texts, _Mapping]]] = ...) -> None: ...

class Texts(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, text: _Optional[_Iterable[str]] = ...) -> None: ...

class Embeddings(_message.Message):
    __slots__ = ("vectors",)
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    vectors: Tensor
    def __init__(self, vectors: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class Concepts(_message.Message):
    __slots__ = ("domain", "vectors", "labels", "means", "deviations")
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    MEANS_FIELD_NUMBER: _ClassVar[int]
    DEVIATIONS_FIELD_NUMBER: _ClassVar[int]
    domain: Tensor
    vectors: Tensor
    labels: Tensor
    means: Tensor
    deviations: Tensor
    def __init__(self, domain: _Optional[_Union[Tensor, _Mapping]] = ..., vectors: _Optional[_Union[Tensor, _Mapping]] = ..., labels: _Optional[_Union[Tensor, _Mapping]] = ..., means: _Optional[_Union[Tensor, _Mapping]] = ..., deviations: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class DomainVector(_message.Message):
    __slots__ = ("domain", "offsets")
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    domain: Tensor
    offsets: Tensor
    def __init__(self, domain: _Optional[_Union[Tensor, _Mapping]] = ..., offsets: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class FeatureStatistics(_message.Message):
    __slots__ = ("counts", "sums", "triangle", "factor")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    TRIANGLE_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    counts: Tensor
    sums: Tensor
    triangle: Tensor
    factor: Tensor
    def __init__(self, counts: _Optional[_Union[Tensor, _Mapping]] = ..., sums: _Optional[_Union[Tensor, _Mapping]] = ..., triangle: _Optional[_Union[Tensor, _Mapping]] = ..., factor: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class FeatureMixtures(_message.Message):
    __slots__ = ("counts", "weights", "means", "variances")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    MEANS_FIELD_NUMBER: _ClassVar[int]
    VARIANCES_FIELD_NUMBER: _ClassVar[int]
    counts: Tensor
    weights: Tensor
    means: Tensor
    variances: Tensor
    def __init__(self, counts: _Optional[_Union[Tensor, _Mapping]] = ..., weights: _Optional[_Union[Tensor, _Mapping]] = ..., means: _Optional[_Union[Tensor, _Mapping]] = ..., variances: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class Votes(_message.Message):
    __slots__ = ("winners",)
    WINNERS_FIELD_NUMBER: _ClassVar[int]
    winners: Tensor
    def __init__(self, winners: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class Domain(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Joint(_message.Message):
    __slots__ = ("part",)
    PART_FIELD_NUMBER: _ClassVar[int]
    part: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, part: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Masked(_message.Message):
    __slots__ = ("roster", "numbers", "shares")
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    roster: str
    numbers: Tensor
    shares: Tensor
    def __init__(self, roster: _Optional[str] = ..., numbers: _Optional[_Union[Tensor, _Mapping]] = ..., shares: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

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
