"""Registries of kinds: a name, the settings class of that kind, and the function that builds it.

    ENGINES = Registry("engine")
    ENGINES.register("mine", "package.my_engine:MySettings", "package.my_engine:build_engine")

Both are import strings, so that the command line imports nothing heavy, and so that another process finds the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from tidemill.core.config import Config
from tidemill.core.errors import ConfigError
from tidemill.core.import_object import load_object


class Kind(NamedTuple):
    """Import strings of one kind, each MODULE:NAME or FILE.py:NAME."""

    settings: str
    builder: str


class Registry:
    """The kinds of one thing, by name. The first one that is registered is the default."""

    def __init__(self, what: str, key: str = "kind") -> None:
        """what: names the thing in errors. key: the key of a settings table that holds the kind's name."""
        self.what, self.key = what, key
        self._kinds: dict[str, Kind] = {}

    def register(self, name: str, settings: str, builder: str) -> None:
        """Add a kind, perhaps once more. Raises ValueError if the name has another meaning."""
        if self._kinds.setdefault(name, Kind(settings, builder)) != (settings, builder):
            known = self._kinds[name].builder
            raise ValueError(f"{self.what} {name!r} is registered already, as {known}: choose another name")

    def unregister(self, name: str) -> None:
        """Remove a kind that was registered."""
        del self._kinds[name]

    def names(self) -> list[str]:
        """The known kinds, the default first."""
        return [*self._kinds]

    @property
    def expected(self) -> str:
        """The known names, as a sentence lists them."""
        return " or ".join(map(repr, self._kinds))

    def settings_of(self, name: str) -> type[Config]:
        """The settings class of a kind. Raises ConfigError for an unknown name."""
        return load_object(self._kind(name).settings)

    def builder_of(self, name: str) -> Callable[..., Any]:
        """The function that builds a kind. Raises ConfigError for an unknown name."""
        return load_object(self._kind(name).builder)

    def all_settings(self) -> list[type[Config]]:
        """The settings classes of all kinds, each once."""
        return list(dict.fromkeys(map(self.settings_of, self._kinds)))

    def table(self) -> dict[str, tuple[str, str]]:
        """Every kind as plain data, for a process that has only what is built in: see `learn`."""
        return {name: (kind.settings, kind.builder) for name, kind in self._kinds.items()}

    def learn(self, table: Mapping[str, tuple[str, str]]) -> None:
        """Register what another process has registered."""
        for name, kind in table.items():
            self.register(name, *kind)

    def _kind(self, name: str) -> Kind:
        if name not in self._kinds:
            raise ConfigError(f"{self.what} {name!r} is not known: expected {self.expected}")
        return self._kinds[name]


class KindSettings(Config):
    """Base of settings whose kinds are in a registry.

    A direct subclass names its registry: `class BaseEngineSettings(KindSettings, registry=ENGINES)`. A field of that
    type takes the settings of any registered kind. The class of each kind declares the key that names it: `kind:
    Literal["mine"] = "mine"`.
    """

    registry: ClassVar[Registry]

    def __init_subclass__(cls, registry: Registry | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if registry is not None:
            cls.registry = registry

    @property
    def kind_name(self) -> str:
        """The name that the registry knows these settings by."""
        return getattr(self, self.registry.key)

    @classmethod
    def variants(cls) -> list[type[Config]]:
        return cls.registry.all_settings() if "registry" in vars(cls) else [cls]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler, /) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(cls._chosen) if "registry" in vars(cls) else handler(source)

    @classmethod
    def _chosen(cls, given: Any) -> Self:
        """`given` as the settings of the kind that it names, else of the default kind."""
        if isinstance(given, cls):
            return given
        key, known = cls.registry.key, cls.registry.names()
        name = given.get(key, known[0]) if isinstance(given, dict) else known[0]
        if name not in known:
            wrong = PydanticCustomError("unknown_kind", "should be {expected}", {"expected": cls.registry.expected})
            raise ValidationError.from_exception_data(cls.__name__, [{"type": wrong, "loc": (key,), "input": name}])
        found = cls.registry.settings_of(name).model_validate(given)
        assert isinstance(found, cls), f"{type(found).__name__} should be a {cls.__name__}"
        return found
