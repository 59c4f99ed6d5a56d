"""The whole configuration of a deployment: one frozen tree, read from one YAML file.

Unknown keys are refused with the nearest known name; every value has its unit in its name, a
default and one line that says what it does, which docs/configuration.md is made of.
"""

from __future__ import annotations

import difflib
import re
import secrets
import types
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from sluice.protocol.messages import ConfigError, Role
from sluice.protocol.reading import read_text, reading, shown
from sluice.protocol.strict_yaml import YamlFault, parse_yaml

UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
SECRETS = ("router.prefix_secret",)
MAX_SHOWN = 20  # problems of one config that are told

# Limits beyond every machine: with them no product or sum of two numbers leaves its type.
Tokens = Annotated[int, Field(gt=0, le=1 << 30)]
Bytes = Annotated[int, Field(gt=0, le=1 << 50)]
Seconds = Annotated[float, Field(gt=0, le=1e7)]


class Section(BaseModel):
    """A part of the config: immutable, and closed to unknown keys.

    GONE: keys that were there, and the way out for a config that has them.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    GONE: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _nothing_gone(cls, data: Any) -> Any:
        for key in cls.GONE.keys() & data.keys() if isinstance(data, dict) else ():
            raise ValueError(f"`{key}` is no key here: {cls.GONE[key]}")
        return data

    @field_validator("*", mode="before")
    @classmethod
    def _is_printable(cls, value: Any) -> Any:
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str):
                _printable(text)
        return value


def _printable(text: str) -> str:
    """No NUL and no half character, which no path, host or line of a log can hold."""
    if UNPRINTABLE.search(text):
        raise ValueError("expected text without control characters")
    return text


Printable = Annotated[str, AfterValidator(_printable)]
AnySection = TypeVar("AnySection", bound=Section)


class ModelConfig(Section):
    """The checkpoint, and how it is computed."""

    path: Path
    """Checkpoint folder: config.json, *.safetensors, tokenizer.json."""
    name: str = ""
    """Name in the API; default: the folder's name."""
    cache_path: Literal["auto", "hybrid", "native"] = "auto"
    """Compressed pools, or one pool of raw rows; auto: hybrid where the model has it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and activations."""
    weights: Literal["stored", "dequantized"] = "stored"
    """Of a quantised checkpoint: its codes, and what they multiply rounded as in the release; or
    exactly, in `dtype`."""
    max_model_len: Tokens | None = None
    """Tokens of prompt and output together; default: what the checkpoint allows."""
    v4_release: Literal["auto", "original", "v0731"] = "auto"
    """DeepSeek-V4: whose reasoning efforts are written; auto: as the encoder in the checkpoint's
    folder tells."""
    tool_format: Literal["auto", "none", "hermes", "llama3_json", "mistral"] = "auto"
    """How a model with its own chat template writes calls; auto: as the template's text tells."""

    @property
    def served_name(self) -> str:
        return self.name or self.path.resolve().name


class PoolConfig(Section):
    """A role's own layout of one pool; what is not given comes from the model's declaration."""

    tokens_per_page: Tokens | None = None
    """Span of a page."""
    dtype: str | None = None
    """`float32`, `bfloat16`, or packed: of window and compressed rows `fp8_v4` (584 bytes at V4's
    shapes), of index keys `fp8` (132) or `fp4` (68)."""
    device: Literal["cpu", "cuda", "host"] | None = None
    """Where the pool lies."""


class RoleConfig(Section):
    """The nodes of one role."""

    GONE = {"tensor_parallel": "leave it out, as a model is not split over GPUs yet"}

    replicas: int = Field(1, ge=0, le=1024)
    """Nodes to start with."""
    min_replicas: int = Field(0, ge=0, le=1024)
    """Lower limit for scaling."""
    max_replicas: int = Field(16, ge=1, le=1024)
    """Upper limit for scaling."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What computes."""
    cache_bytes: Bytes = 256 << 20
    """Memory for all pools of one node."""
    pools: dict[str, PoolConfig] = Field(default_factory=dict)
    """Layouts of single pools."""
    max_batch_tokens: Tokens = 512
    """Tokens one step computes (the chunk size)."""
    max_running_requests: int = Field(16, gt=0, le=65_536)
    """Requests a node holds pages for."""
    prefix_cache: bool = True
    """Keep pages of finished work for requests that begin the same."""
    num_cpus: int = Field(1, ge=1, le=1024)
    """CPU cores, and torch threads, of one node."""
    num_gpus: int = Field(0, ge=0, le=1024)
    """GPUs of one node."""

    @model_validator(mode="after")
    def _limits_in_order(self) -> RoleConfig:
        if not self.min_replicas <= self.replicas <= self.max_replicas:
            raise ValueError(
                f"replicas is {self.replicas}, expected {self.min_replicas} (min_replicas) to "
                f"{self.max_replicas} (max_replicas)"
            )
        return self


class PrefillConfig(RoleConfig):
    """The prefill nodes."""

    resume_every_tokens: Tokens = 4096
    """Where in long prompts work can resume, beside their ends."""


class DecodeConfig(RoleConfig):
    """The decode nodes."""

    GONE = {**RoleConfig.GONE, "resume_every_tokens": "write it under `prefill`, which resumes"}


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError("expected a URL such as http://127.0.0.1:8001")
    return text


class CanaryConfig(Section):
    """A second deployment, with a router of its own, that a share of the requests is tried on."""

    GONE = {
        "config": "a router starts no second deployment; start it with `sluice up OTHER.yaml` and "
        "give its `url`"
    }

    url: str
    """Of its router, such as http://127.0.0.1:8001."""
    model: str = ""
    """Its model's name in the API; default: the name the client gives."""
    weight: float = Field(0.1, ge=0, le=1)
    """Share of the requests; 1: all."""
    shadow: bool = True
    """A copy goes there and is compared; false: clients get its answers."""
    timeout_s: Seconds = 60.0
    """For its answer; streamed to a client, for each piece."""
    api_keys_file: Path | None = None
    """The first key in it is sent to the canary."""

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        return _url(url)


ORIGIN = re.compile(r"https?://[^/\s]+")
PolicyName = Literal["round_robin", "least_loaded", "power_of_two", "cache_aware"]


class RouterConfig(Section):
    """The HTTP endpoint, and which request goes where."""

    GONE = {"otlp_endpoint": "write it at the top level, as nodes send traces, too"}

    host: str = "127.0.0.1"
    """Address that the port is opened at."""
    port: int = Field(8000, ge=0, le=65535)
    """0: any free port."""
    replicas: int = Field(1, ge=1, le=64)
    """Router processes; those of one host share the port."""
    prefill_policy: PolicyName = "cache_aware"
    """Who computes a prompt; cache_aware: where most of it is cached, against load."""
    decode_policy: PolicyName = "cache_aware"
    """Who generates."""
    local_prefill_below_tokens: int = Field(0, ge=0, le=1 << 30)
    """Shorter prompts are computed on decode; 0: none."""
    max_queue: int = Field(1024, ge=0, le=1 << 30)
    """Requests that may wait, in each router process; more get a 429."""
    request_timeout_s: Seconds = 600.0
    """From arrival to the last token."""
    keep_alive_s: int = Field(75, gt=0, le=86_400)
    """How long an idle connection stays open: longer than clients keep theirs."""
    api_keys_file: Path | None = None
    """A key a line, `admin:KEY` for one that opens `/admin/...` too; without such lines every key
    does."""
    metrics_key: bool = False
    """Whether GET /metrics takes a key of api_keys_file, any of them."""
    tls_cert_file: Path | None = None
    """PEM, with its chain: serve HTTPS."""
    tls_key_file: Path | None = None
    """PEM, without a passphrase."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose browser pages may call the API; "*": all."""
    prefix_secret: SecretStr | None = Field(None, min_length=16)
    """What the keys of cached prefixes hang on; default: drawn by `up`."""
    canary: CanaryConfig | None = None
    """Another deployment to compare with, or to try out."""

    @model_validator(mode="after")
    def _certificate_with_its_key(self) -> RouterConfig:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("expected both tls_cert_file and tls_key_file, or neither")
        return self

    @model_validator(mode="after")
    def _keys_where_they_are_asked_for(self) -> RouterConfig:
        if self.metrics_key and self.api_keys_file is None:
            raise ValueError("metrics_key is true, expected api_keys_file with the keys it takes")
        return self

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin, expected one such as https://chat.example.org "
                    "without a path, or '*'"
                )
        return origins


INTERFACE = r"^[A-Za-z0-9._:@-]{1,64}$"  # eth0, or a port of an RDMA device: mlx5_0:1


class TransferConfig(Section):
    """How pages get from prefill to decode."""

    backend: str = "UCX"
    """NIXL backend, or "local" within one process."""
    backend_params: dict[str, Printable] = Field(default_factory=dict)
    """NIXL's own for the backend."""
    interface: str | None = Field(None, pattern=INTERFACE)
    """That UCX is bound to, such as eth0; default: the one with the host's address in Ray, on one
    host loopback."""
    mode: Literal["write", "read"] = "write"
    """Prefill writes pages, or decode reads them."""
    lease_s: Seconds = 30.0
    """How long a grant outlives its last sign of progress."""
    checksum: Literal["off", "sample", "full"] = "off"
    """Whether decode compares an xxhash of all rows of each pool, or of some."""
    staging_bytes: Bytes = 64 << 20
    """Memory for rows that change layout on their way; taken when needed."""


class RayConfig(Section):
    """The cluster that the processes run on."""

    address: str | None = None
    """A running cluster; default: one of our own on this machine."""
    namespace: str = "sluice"
    """Of the actors: one for each deployment."""


class SluiceConfig(Section):
    """The root of a config file."""

    model: ModelConfig
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    router: RouterConfig = RouterConfig()
    transfer: TransferConfig = TransferConfig()
    ray: RayConfig = RayConfig()
    log_format: Literal["text", "json"] = "text"
    """Of every process: key=value, or an object a line."""
    otlp_endpoint: str | None = None
    """Collector of traces of router and nodes (OTLP over HTTP)."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_url(cls, endpoint: str | None) -> str | None:
        return endpoint if endpoint is None else _url(endpoint)

    def role(self, role: Role) -> RoleConfig:
        """The section of one role."""
        return self.prefill if role is Role.PREFILL else self.decode


def with_prefix_secret(config: SluiceConfig) -> SluiceConfig:
    """The config with a secret of its own where none was given: drawn once for a deployment, so
    that routers, those that take a dead one's place too, and nodes agree on prefixes' keys.
    """
    if config.router.prefix_secret is not None:
        return config
    secret = SecretStr(secrets.token_hex(32))
    router = config.router.model_copy(update={"prefix_secret": secret})
    return config.model_copy(update={"router": router})


def load_config(path: Path) -> SluiceConfig:
    """Read and check a YAML config; relative paths in it are relative to the file.

    Raises ConfigError naming the key, the value, the expectation and, for an unknown key, the
    nearest known one.
    """
    text = read_text(
        path, "config", "give the path of a YAML file, for example deploy/configs/local.yaml"
    )
    with reading(f"config {path}"):
        try:
            data = parse_yaml(text)
        except YamlFault as error:
            raise ConfigError(f"config {path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"config {path}: expected keys such as `model:`, got {type(data).__name__}"
        )
    config = parse_config(data, source=str(path))
    base = path.resolve().parent
    router = config.router
    for key in ("api_keys_file", "tls_cert_file", "tls_key_file"):
        router = _resolved(router, key, base)
    if router.canary is not None:
        canary = _resolved(router.canary, "api_keys_file", base)
        router = router.model_copy(update={"canary": canary})
    model = _resolved(config.model, "path", base)
    return config.model_copy(update={"model": model, "router": router})


def _resolved(section: AnySection, key: str, base: Path) -> AnySection:
    """The section with the path at `key`, if there is one, taken relative to `base`."""
    path = getattr(section, key)
    if path is None:
        return section
    try:
        return section.model_copy(update={key: base / path.expanduser()})
    except RuntimeError as error:  # `~somebody` whom this machine does not know
        raise ConfigError(f"{key} {path}: {error}; write the folder's whole path") from error


def parse_config(data: Mapping[str, Any], source: str = "config") -> SluiceConfig:
    """Check a config given as nested mappings. Raises ConfigError."""
    try:
        return SluiceConfig.model_validate(data)
    except ValidationError as error:
        problems = "\n".join(f"  {line}" for line in islice(_explain(error), MAX_SHOWN))
        raise ConfigError(f"{source}: {error.error_count()} problem(s)\n{problems}") from error


def _explain(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        key = ".".join(str(part)[:80] for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            known = _known_keys(problem["loc"][:-1])
            close = difflib.get_close_matches(str(problem["loc"][-1])[:80], known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
            yield f"{key}: unknown key; {hint}"
        elif problem["type"] == "missing":
            yield f"{key}: missing; it has no default"
        elif problem["type"] == "value_error" and isinstance(problem["input"], dict):
            yield f"{key}: {problem['ctx']['error']}"  # of a section, which may hold a secret
        else:
            got = "what is not shown" if key in SECRETS else shown(problem["input"])
            yield f"{key}: {problem['msg']}, got {got}"


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """Keys of the section that a pydantic error location points at."""
    section: Any = SluiceConfig
    for part in location:
        if (field := section.model_fields.get(str(part))) is not None:
            section = _section_type(field.annotation)
    return list(section.model_fields)


def _section_type(annotation: Any) -> Any:
    """The Section inside an annotation such as `dict[str, PoolConfig]` or `X | None`."""
    if get_origin(annotation) in (dict, Union, types.UnionType):
        return _section_type([a for a in get_args(annotation) if a is not type(None)][-1])
    return annotation
