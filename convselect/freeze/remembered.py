"""What was chosen for frozen layers, blocks and whole networks: in this process, and in the store for later ones."""

from __future__ import annotations

from typing import Any, NamedTuple

from convselect.base.problem import ConvProblem
from convselect.base.settings import Settings
from convselect.kernels.pool import BY_NAME
from convselect.store import process
from convselect.store.decision import Decision


class Key(NamedTuple):
    """What a choice is for.

    Attributes:
        kind: that of a layer (see `chains.Layer`), "block", "network" or "tiles".
        problem: the first one, if there are several.
        form: everything else that the choice depends on, as a text that is only compared.
        settings: the budgets.
    """

    kind: str
    problem: ConvProblem
    form: str
    settings: Settings

    @property
    def budgets(self) -> str:
        return f"frozen {self.kind} {self.form}; {self.settings.budgets}"


class Remembered:
    """Choices by key. Those of the store are asked for once."""

    def __init__(self) -> None:
        self._chosen: dict[Key, str] = {}
        self._any_size: dict[Any, str] = {}

    def get(self, key: Key) -> str | None:
        if key not in self._chosen:
            found = process.look_up(key.problem, key.budgets)
            if found is None:
                return None
            self.put(key, found.algorithm, store=False)
        return self._chosen[key]

    def for_any_size(self, key: Key) -> str | None:
        """What was last chosen for the same layer and another size of image."""
        return self._any_size.get(_sizeless(key))

    def put(self, key: Key, chosen: str, *, store: bool = True) -> None:
        self._chosen[key] = self._any_size[_sizeless(key)] = chosen
        if store:
            revision = BY_NAME[chosen].revision if chosen in BY_NAME else 1
            process.remember(Decision(key.problem, key.budgets, chosen, source="freeze", revision=revision))


def _sizeless(key: Key) -> Key:
    return key._replace(problem=key.problem._replace(N=0, H=0, W=0))
