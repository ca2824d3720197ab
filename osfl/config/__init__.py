"""The configuration: one schema, parsed and checked once at the edge.

The *run-config* is equal on all nodes: `[tool.flwr.app.config]` in pyproject.toml, overridden by
`--run-config` or by `osfl run FILE.toml key=value`. The *node-config* differs between machines.
No code below the two apps reads a Flower context.

`sections` declares every key; only pyproject.toml has the defaults. Keys are kebab-case there
(`feddeo.guidance-text`) and snake_case here.
"""

from osfl.config.markers import ConfigError, OneOf, Range, Scalar
from osfl.config.names import IDENTIFIER_RULE, is_identifier, split_names
from osfl.config.parse import (
    NODE_NOT_IDENTITY,
    NOT_IDENTITY,
    SITE_PATHS,
    approximations,
    flatten,
    node_schema,
    parse_node_config,
    parse_run_config,
    resolve_auto,
    schema,
)
from osfl.config.problems import guarantee_problem
from osfl.config.sections import (
    ClassifierConfig,
    ConditionTraining,
    DataConfig,
    DomainVectorConfig,
    EspressoConfig,
    FedBiPConfig,
    FedCADOConfig,
    FedCGSConfig,
    FedDEOConfig,
    FedDISCConfig,
    FedLMGConfig,
    FedPFTConfig,
    FGLConfig,
    NodeConfig,
    OscarConfig,
    PromptsDomainConfig,
    PromptsOnlyConfig,
    RoundsConfig,
    RunConfig,
    SynthesisConfig,
    VotesConfig,
)

__all__ = [
    "IDENTIFIER_RULE",
    "NODE_NOT_IDENTITY",
    "NOT_IDENTITY",
    "SITE_PATHS",
    "ClassifierConfig",
    "ConditionTraining",
    "ConfigError",
    "DataConfig",
    "DomainVectorConfig",
    "EspressoConfig",
    "FGLConfig",
    "FedBiPConfig",
    "FedCADOConfig",
    "FedCGSConfig",
    "FedDEOConfig",
    "FedDISCConfig",
    "FedLMGConfig",
    "FedPFTConfig",
    "NodeConfig",
    "OneOf",
    "OscarConfig",
    "PromptsDomainConfig",
    "PromptsOnlyConfig",
    "Range",
    "RoundsConfig",
    "RunConfig",
    "Scalar",
    "SynthesisConfig",
    "VotesConfig",
    "approximations",
    "flatten",
    "guarantee_problem",
    "is_identifier",
    "node_schema",
    "parse_node_config",
    "parse_run_config",
    "resolve_auto",
    "schema",
    "split_names",
]
