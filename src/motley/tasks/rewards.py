"""Reward functions of a user's own: what they are called with, and what their answers mean.

f(prompts, completions, **columns) -> one number, or None for "does not apply", per completion. It
may name only the arguments that it wants, and it may be async. Owns the call; knows no task.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import math
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from motley.tasks.modes import Modes

Reward = Callable[..., Any]
Columns = dict[str, list[Any]]

MODES = Modes()
FAILURES = (Exception, SystemExit)  # a user's sys.exit() must not end a run without a word
EXPECTED = (
    "expected f(prompts, completions, **columns) -> a number or None for each completion, whatever "
    "the completions say"
)


class RewardError(ValueError):
    """A reward function failed. What it raised is the cause; `details` is its traceback."""

    def __init__(self, name: str, text: str, details: str = "") -> None:
        super().__init__(text)
        self.name = name
        self.details = details


class RewardFunction:
    """One function, by the name under which a crew knows it: module:function."""

    def __init__(self, function: Reward, name: str = "") -> None:
        if not callable(function):
            raise ValueError(f"a reward is {type(function).__name__}; {EXPECTED}")
        self.function = function
        self.name = name or _name_of(function)
        self.weight = 1.0
        self._wanted = _wanted(function, self.name)

    def weigh(self, weight: float) -> None:
        if not math.isfinite(weight):
            raise ValueError(
                f"the weight of reward {self.name} is {weight}; expected a number, such as 0.5"
            )
        self.weight = float(weight)

    def check(self, columns: Iterable[str]) -> None:
        """Refuse a function that asks for what no row has."""
        known = {"prompts", "completions", *columns}
        missing = [name for name in self._wanted.required if name not in known]
        if missing:
            named = '; name it, as in fields = { answer = "solution" }'
            raise ValueError(
                f"reward {self.name} asks for {', '.join(missing)}, which no row has; it can have "
                f"{', '.join(sorted(known))}{named if 'answer' in missing else ''}"
            )

    def call(self, prompts: Sequence[Any], completions: Sequence[str], columns: Columns) -> Any:
        """What the function returns: numbers, or a promise of them."""
        given = {"prompts": prompts, "completions": completions, **columns}
        # copies of its own: a list that it sorts or empties is a problem's, and all others' too
        own = {
            name: [copy.deepcopy(value) for value in values]
            for name, values in self._wanted.of(given).items()
        }
        return self.function(**own)

    def numbers(self, returned: Any, count: int) -> list[float | None]:
        """What it returned, as one number or None per completion."""
        if isinstance(returned, str | bytes | dict) or not isinstance(returned, Iterable):
            raise RewardError(
                self.name,
                f"reward {self.name} returned {_short(returned)}; expected a list of {count} "
                "numbers, one for each completion",
            )
        # a generator runs here; what else has elements is a list, an array or a tensor
        rewards = [None if value is None else float(value) for value in returned]
        if len(rewards) != count:
            raise RewardError(
                self.name,
                f"reward {self.name} returned {len(rewards)} rewards for {count} completions; "
                "expected one each",
            )
        strange = [r for r in rewards if r is not None and not math.isfinite(r)]
        if strange:
            raise RewardError(
                self.name,
                f"reward {self.name} returned {strange[0]}; expected numbers, or None where it "
                "does not apply",
            )
        return rewards

    def failed(self, error: BaseException) -> RewardError:
        """What to raise for what the function raised."""
        return RewardError(
            self.name,
            f"reward {self.name} failed: {type(error).__name__}: {_short(error, 300)}; {EXPECTED}",
            _own_traceback(error),
        )


class Rewards:
    """Several functions as one: the weighted sum of those that apply to a completion.

    Where none applies the reward is 0.
    """

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self.functions = tuple(functions)

    @property
    def names(self) -> str:
        """Names and weights, as they stand in a fingerprint."""
        return " ".join(f"{f.name}*{f.weight!r}" for f in self.functions)

    @property
    def only_promise(self) -> bool:
        """Whether all of them are async, and so run in a thread of their own anyway."""
        return all(inspect.iscoroutinefunction(f.function) for f in self.functions)

    def check(self, columns: Iterable[str]) -> None:
        known = list(columns)
        for function in self.functions:
            function.check(known)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Columns
    ) -> list[float]:
        """One reward per completion."""
        if not completions:
            return []
        with MODES.kept():
            returned = [_called(f, prompts, completions, columns) for f in self.functions]
            returned = _all_awaited(self.functions, returned)
            parts = [
                _numbers(function, value, len(completions))
                for function, value in zip(self.functions, returned, strict=True)
            ]
        return [self._sum([part[i] for part in parts]) for i in range(len(completions))]

    def _sum(self, parts: Sequence[float | None]) -> float:
        return math.fsum(
            f.weight * part
            for f, part in zip(self.functions, parts, strict=True)
            if part is not None
        )


def _called(
    function: RewardFunction, prompts: Sequence[Any], completions: Sequence[str], columns: Columns
) -> Any:
    try:
        return function.call(prompts, completions, columns)
    except FAILURES as error:
        raise function.failed(error) from error


def _numbers(function: RewardFunction, returned: Any, count: int) -> list[float | None]:
    try:
        return function.numbers(returned, count)
    except RewardError:
        raise
    except FAILURES as error:  # a generator of the user's, or what is no number
        raise function.failed(error) from error


# Functions that promise


def _all_awaited(functions: Sequence[RewardFunction], returned: list[Any]) -> list[Any]:
    """What was returned, with promises awaited together."""
    promised = [i for i, value in enumerate(returned) if inspect.isawaitable(value)]
    if not promised:
        return returned

    async def kept() -> list[Any]:
        return await asyncio.gather(*(_kept(returned[i]) for i in promised), return_exceptions=True)

    # In a loop of its own, for good: a notebook has one that is running already, and a client that
    # a user opened once belongs to the loop of its first call.
    future = asyncio.run_coroutine_threadsafe(kept(), _loop(os.getpid()))
    try:
        results = future.result()
    except BaseException:
        future.cancel()
        raise
    for i, result in zip(promised, results, strict=True):
        if isinstance(result, FAILURES):
            raise functions[i].failed(result) from result
        if isinstance(result, BaseException):
            raise result
        returned[i] = result
    return returned


async def _kept(promise: Awaitable[Any]) -> Any:
    return await promise


def _loop(owner: int) -> asyncio.AbstractEventLoop:
    """One per process, in a thread that ends with it; also where several threads ask at once."""
    with _MAKING:
        return _loop_of(owner)


_MAKING = threading.Lock()


@cache
def _loop_of(owner: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=(loop,), name="rewards", daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """For good: sys.exit() in a promise also ends the loop that keeps it, which begins again."""
    while True:
        with suppress(SystemExit):
            loop.run_forever()


# What a function is and wants


class _Arguments:
    """The arguments that a function names; all of them if it takes any."""

    def __init__(self, named: frozenset[str] | None, required: tuple[str, ...]) -> None:
        self._named, self.required = named, required

    def of(self, given: dict[str, Any]) -> dict[str, Any]:
        if self._named is None:
            return given
        return {name: value for name, value in given.items() if name in self._named}


def _wanted(function: Reward, name: str) -> _Arguments:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of C; it is asked with everything
        return _Arguments(None, ())
    bare = [p for p in parameters if p.kind is not p.VAR_POSITIONAL]
    if any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in bare):
        raise ValueError(
            f"reward {name}{inspect.signature(function)} has arguments without names; {EXPECTED}"
        )
    keywords = [p for p in bare if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in bare)
    return _Arguments(
        None if takes_all else frozenset(p.name for p in keywords),
        tuple(p.name for p in keywords if p.default is p.empty),
    )


def _name_of(function: Reward) -> str:
    named = getattr(function, "func", function)  # of a functools.partial
    if not hasattr(named, "__qualname__"):
        named = type(named)
    return f"{named.__module__}:{named.__qualname__}"


def _short(value: object, most: int = 80) -> str:
    text = str(value) if isinstance(value, BaseException) else repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _own_traceback(error: BaseException) -> str:
    """A traceback that begins in the user's code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


# Where a function is


def load_reward(spec: str) -> RewardFunction:
    """Import "module:function", or "FOLDER/module:function" from that folder before any other."""
    place, _, function_name = spec.rpartition(":")
    if not place or not function_name:
        raise ValueError(f"reward {spec!r} names no function; write it as module:function")
    folder, module_name = os.path.split(place.removesuffix(".py"))
    name = f"{module_name}:{function_name}"
    if module_name == "__main__" or "<" in function_name:
        raise ValueError(
            f"reward {name} was given in a Python program, which alone knows it; go on from there "
            "with motley.Crew(…).train(folder), or put the function into a module of its own"
        )
    if folder and module_name.partition(".")[0] in sys.stdlib_module_names:
        raise ValueError(f"reward {name}: Python has a module {module_name} itself; rename yours")
    try:
        with MODES.kept():
            module = _imported(folder, module_name)
    except ModuleNotFoundError as error:
        if error.name and not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"reward {name}: {module_name} needs {error}; install it") from error
        raise ValueError(
            f"reward {name}: cannot import {module_name}: {error}; put {module_name}.py beside the "
            "crew file, or on PYTHONPATH"
        ) from None
    except FAILURES as error:
        raise RewardError(
            name,
            f"reward {name}: importing {module_name} failed: {type(error).__name__}: {error}",
            _own_traceback(error),
        ) from error
    function = module
    for part in function_name.split("."):
        if not hasattr(function, part):
            raise ValueError(f"reward {name}: module {module_name} has no {function_name}")
        function = getattr(function, part)
    if not callable(function):
        raise ValueError(f"reward {name}: {function_name} is {type(function).__name__}; {EXPECTED}")
    return RewardFunction(function, name)


def named_reward(spec: str) -> RewardFunction:
    """A function that is not imported, for who only asks which problems a task has."""

    def reward(**given: object) -> list[None]:
        raise ValueError(f"reward {spec} was not loaded")

    return RewardFunction(reward, os.path.split(spec)[1].replace(".py:", ":"))


_FOLDERS: set[Path] = set()  # that modules were imported from
_LOADED: dict[tuple[Path, str], tuple[ModuleType, int]] = {}  # with when its file was changed


def _imported(folder: str, name: str) -> ModuleType:
    """The module of this name in a folder; without one, where Python finds it.

    Another module of the same name, of another crew's or of anybody's, is set aside meanwhile.
    What was made of it keeps working.
    """
    home, top = Path(folder or os.getcwd()).resolve(), name.partition(".")[0]
    known = _LOADED.get((home, name))
    if known and _changed_ns(known[0]) == known[1]:
        return known[0]
    beside = {path.stem for path in home.glob("*.py")} if folder else set()
    aside = _set_aside({top, *beside} - sys.stdlib_module_names, home, known is not None)
    if not folder:  # then anybody's will do
        sys.modules.update(aside)
    _FOLDERS.add(home)
    # as `python -m` does with the working folder; it stays, for what is imported in a function
    if str(home) in sys.path:
        sys.path.remove(str(home))
    sys.path.insert(0, str(home))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    finally:
        sys.modules.update(aside)
    _LOADED[home, name] = module, _changed_ns(module)
    return module


def _set_aside(tops: set[str], home: Path, again: bool) -> dict[str, ModuleType]:
    """Have Python forget modules of these names that are not of a folder, or all of them.

    Those of no crew's folder come back.
    """
    aside: dict[str, ModuleType] = {}
    for known, module in list(sys.modules.items()):
        top = known.partition(".")[0]
        file = getattr(module, "__file__", None)
        if top not in tops or not file:
            continue
        path = Path(file).resolve()
        is_of = lambda folder: path == folder / f"{top}.py" or folder / top in path.parents  # noqa: B023
        folders = [folder for folder in (home, *_FOLDERS) if is_of(folder)]
        if home in folders and not again:
            continue
        del sys.modules[known]
        if not folders:
            aside[known] = module
    return aside


def _changed_ns(module: ModuleType) -> int:
    try:
        return Path(module.__file__ or "").stat().st_mtime_ns
    except OSError:
        return 0
