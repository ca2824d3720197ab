"""The configuration: one schema, parsed and checked once at the edge.

The *run-config* is equal on all nodes: `[tool.flwr.app.config]` in pyproject.toml, overridden by
`--run-config` or by `osfl run FILE.toml key=value`. The *node-config* differs between machines.
No code below the two apps reads a Flower context.

`sections` and the modules of osfl/methods declare every key; only pyproject.toml has the defaults.
Keys are kebab-case there (`feddeo.guidance-text`) and snake_case here.
"""

from osfl.config.kinds import (
    all_parts,
    is_mixed,
    kinds_of,
    loads_clip,
    parts_of,
    sends_payloads,
)
from osfl.config.parse import (
    NODE_NOT_IDENTITY,
    NOT_IDENTITY,
    SITE_PATHS,
    approximations,
    flat_methods,
    flatten,
    installed_defaults,
    node_schema,
    parse_node_config,
    parse_run_config,
    payload_settings,
    resolve_auto,
    schema,
)
from osfl.config.problems import guarantee_problem, lowest_threshold
from osfl.config.sections import (
    COMPARISON,
    LOCAL_BASELINE,
    TEST_ONLY,
    TRAIN_AND_TEST,
    ClassifierConfig,
    DataConfig,
    NodeConfig,
    RunConfig,
    SynthesisConfig,
)
from osfl.methods.domain_vector import DomainVectorConfig
from osfl.methods.espresso import EspressoConfig
from osfl.methods.fedbip import FedBiPConfig
from osfl.methods.fedcado import FedCADOConfig
from osfl.methods.fedcgs import FedCGSConfig
from osfl.methods.feddeo import FedDEOConfig
from osfl.methods.feddisc import FedDISCConfig
from osfl.methods.fedlmg import FedLMGConfig
from osfl.methods.fedpft import FedPFTConfig
from osfl.methods.fgl import FGLConfig
from osfl.methods.iterative import RoundsConfig
from osfl.methods.oscar import OscarConfig
from osfl.methods.prompts_domain import PromptsDomainConfig
from osfl.methods.prompts_only import PromptsOnlyConfig
from osfl.methods.shared_sections import ConditionTraining
from osfl.methods.votes import VotesConfig
from osfl.util.markers import ConfigError, OneOf, Range, Scalar
from osfl.util.names import IDENTIFIER_RULE, is_identifier, split_names

__all__ = [
    "COMPARISON",
    "IDENTIFIER_RULE",
    "LOCAL_BASELINE",
    "NODE_NOT_IDENTITY",
    "NOT_IDENTITY",
    "SITE_PATHS",
    "TEST_ONLY",
    "TRAIN_AND_TEST",
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
    "all_parts",
    "approximations",
    "flat_methods",
    "flatten",
    "guarantee_problem",
    "installed_defaults",
    "is_identifier",
    "is_mixed",
    "kinds_of",
    "loads_clip",
    "lowest_threshold",
    "node_schema",
    "parse_node_config",
    "parse_run_config",
    "parts_of",
    "payload_settings",
    "resolve_auto",
    "schema",
    "sends_payloads",
    "split_names",
]
