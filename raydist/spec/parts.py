"""What the sections of a spec have in common: their base class, the mark of a field that names an extension, and the error of a
validator, which keeps field, value, problem and remedy apart until they are shown.

Runs anywhere.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from raydist import registry


class SpecValueError(ValueError):
    """Values that do not go together. `field` is relative to the section whose validator raises it."""

    def __init__(self, field: str, value: Any, what: str, remedy: str) -> None:
        super().__init__(field, value, what, remedy)
        self.field, self.value, self.what, self.remedy = field, value, what, remedy


def short_name(value: Any) -> Any:
    """A section that is given as its name alone."""
    return {"name": value} if isinstance(value, str) else value


def problem(field: str, value: Any, what: str, remedy: str) -> SpecValueError:
    """A SpecValueError, for `raise problem(...)` in a validator."""
    return SpecValueError(field, value, what, remedy)


MOST_SECONDS = 1e8
"""Three years; the longest wait of a thread is a hundred times as much."""
_TIME = re.compile(r".*_s|.*timeout.*|wait_for.*")


def _leaves(annotation: Any) -> set[Any]:
    """The types that it is a union of, or that its lists and dicts hold, the values of its literals, and its annotations."""
    inner = get_args(annotation)
    return {leaf for each in inner for leaf in _leaves(each)} if inner else {annotation}


def _refuse_bool(name: str, value: Any, annotation: Any) -> None:
    """Raises SpecValueError for a bool where numbers are meant: pydantic takes it for 0 or 1, but the file has yes, no or on."""
    inner = [*value.values()] if isinstance(value, dict) else [*value] if isinstance(value, (list, tuple)) else [value]
    if not any(isinstance(each, bool) for each in inner):
        return
    leaves = _leaves(annotation)
    takes = any(leaf in (bool, Any) or isinstance(leaf, bool) for leaf in leaves)
    if takes or leaves.isdisjoint((int, float)):
        return
    others = [*sorted(leaf for leaf in leaves if isinstance(leaf, str)), *(["null"] if type(None) in leaves else [])]
    alone = isinstance(value, bool)
    what = "is no number" if alone else "has a value that is no number"
    raise problem(name, value, f"{what} (YAML reads yes, no, on and off as true and false)",
                  f"give {' or '.join(['a number', *others])}" if alone else "give numbers")  # fmt: skip


class Part(BaseModel):
    """A section: unknown fields are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, given: Any) -> Any:
        """Numbers that a thread, a file or another process could not take."""
        for name, value in given.items() if isinstance(given, dict) else ():
            if name in cls.model_fields:
                _refuse_bool(name, value, cls.model_fields[name].annotation)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if number and isinstance(value, int) and abs(value) > 1 << 63:
                raise problem(str(name), None, "is an integer of more than 64 bits", "give a smaller one")
            if number and _TIME.fullmatch(str(name)) and value > MOST_SECONDS:
                raise problem(str(name), value, f"is more than {MOST_SECONDS:.0e} seconds, the limit", "give fewer")
        return given


class PartWithNewFields(Part):
    """A section with fields that older versions of raydist do not know.

    A dump leaves them out while they have their default. So the hash of a job, and the numbers that a resumed run must agree on,
    are those of the older version until a job sets such a field.
    """

    new_fields: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        made: dict[str, Any] = handler(self)
        for name in self.new_fields:
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            if name in made and getattr(self, name) == default:
                del made[name]
        return made


@dataclass(frozen=True)
class Extension:
    """Marks a field of type str that names an extension of `kind`; the field `options` beside it has its options.

    `bare`: extensions of this kind have no options; a field `options` beside it belongs to another.
    `also`: other values that the field takes. `flat`: the options of built-in ones are fields of the section, which checks them.
    """

    kind: str
    also: tuple[str, ...] = ()
    flat: bool = False
    bare: bool = False

    def names(self) -> list[str]:
        """The built-in values of the field."""
        return [*self.also, *registry.names(self.kind)]

    def __get_pydantic_json_schema__(self, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The built-in names, or `package.module:attribute`."""
        made = handler(core)
        del made["type"]
        own = {"type": "string", "pattern": ":"}
        return {**made, "anyOf": [{"enum": names}, own]} if (names := self.names()) else {**made, **own}


def check_spec(kind: str, name: str, section: Any) -> None:
    """Calls `check_spec` of an extension's file, if it has one. It raises SpecValueError."""
    check = registry.described(kind, name, "check_spec")
    if check is not None:
        with suppress(ValidationError):  # of its options: raydist.spec.validate.extensions reports these
            check(section)


def near_divisors(n: int, near: int, field: str = "") -> str:
    """A remedy: divisors of `n` near `near`, and the field to set to one."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    fits = sorted({*small, *(n // d for d in small)}, key=lambda d: abs(d - near))[:3]
    return f"try {field + ' ' if field else ''}{' or '.join(str(d) for d in sorted(fits))}"


def _whole(value: Any) -> Any:
    """YAML reads 1e6 as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Tokens = Annotated[int, Field(ge=1, le=1 << 62), BeforeValidator(_whole)]
"""A number of tokens: a whole number, which may be written as 1e6."""
Factor = Annotated[float, Field(gt=0)]
