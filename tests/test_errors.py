"""Errors keep everything across processes, and have the base classes and exit codes that callers expect."""

from __future__ import annotations

import pickle

import pytest

from raydist import errors


def tree(cls: type) -> list[type]:
    """A class and all its subclasses."""
    return [cls, *(d for c in cls.__subclasses__() for d in tree(c))]


@pytest.mark.parametrize("cls", tree(errors.RaydistError), ids=lambda c: c.__name__)
def test_errors_survive_pickle(cls: type[errors.RaydistError]) -> None:
    """Message, hint, text and exit code are the same after pickling."""
    error = cls("what: where", "how to mend it")
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is cls
    assert (other.message, other.hint, str(other)) == ("what: where", "how to mend it", "what: where\n  how to mend it")
    assert other.exit_code == error.exit_code


def test_rank_failed_survives_pickle() -> None:
    """The fields of a RankFailed are the same after pickling."""
    error = errors.RankFailed(3, "ValueError", "bad", "Traceback ...", 12.5, ("ValueError", "Exception"))
    other = pickle.loads(pickle.dumps(error))
    assert vars(other) == vars(error)
    assert str(other) == "rank 3: ValueError: bad"


@pytest.mark.parametrize(
    ("cls", "builtin", "code"),
    [
        (errors.SpecError, ValueError, 2),
        (errors.RunNotFound, LookupError, 2),
        (errors.ExtensionNotFound, LookupError, 2),
        (errors.StorageError, OSError, 3),
        (errors.NonFinite, ArithmeticError, 3),
        (errors.SpecChanged, errors.CheckpointError, 2),
    ],
)
def test_errors_are_what_callers_expect(cls: type[errors.RaydistError], builtin: type, code: int) -> None:
    """A narrow error is also the builtin with the same meaning, and a command exits with the code of its kind."""
    assert issubclass(cls, builtin)
    assert cls.exit_code == code


def test_every_error_stands_in_the_drawing() -> None:
    """The module's docstring shows the whole tree."""
    assert errors.__doc__ is not None
    for cls in tree(errors.RaydistError):
        assert cls.__name__ in errors.__doc__
