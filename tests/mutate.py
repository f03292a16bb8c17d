"""Mutation testing of motley.objectives: change one thing in its source, run tests/objectives,
expect a failure.

    OMP_NUM_THREADS=1 python tests/mutate.py --jobs 2 --json mutation.json

A mutant is one change to a module's syntax tree: an operator, a comparison, a sign, a constant, a
text, min for max, a dropped call (detach, clamp, ...), a dropped keyword, swapped branches.
Defaults and tables are mutated like functions; docstrings, annotations, decorators and type aliases
are not. Each mutant runs in a fork, so torch is imported once; no file is written. It meets the
tests that run its statement: those that killed most first, then the quickest. A change within a
function is made in the imported function, after the tests were collected; a change in what an
import makes (tables, defaults) imports and collects anew, one file of tests after the other.
Exit status 1 below 98 %. EQUIVALENT names the changes that no test can see, each with its reason.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import gc
import hashlib
import importlib.abc
import importlib.util
import itertools
import json
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy  # noqa: F401  every fork finds these imported
import pytest
import scipy.stats  # noqa: F401
import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "motley.objectives"
SOURCE = ROOT / "src" / "motley" / "objectives"
TESTS = [
    "golden",
    "settings",
    "advantages",
    "gepo",
    "limits",
    "reports",
    "strangers",
    "inner_steps",
    "looks",
    "spans",
    "about",
    "invariances",
    "against_reference",
]
PYTEST_OPTIONS = [
    "-x",  # one failure is enough
    "-q",
    "--no-header",
    "--tb=no",
    "--assert=plain",
    "-p",
    "no:cacheprovider",
    "--capture=no",  # mutants are tried, and told of, within a run
    f"--rootdir={ROOT}",
]
REQUIRED_SCORE = 0.98
TELL = "_tell_that_it_runs"
WORDS = ("__init__.py", "about.py")  # names and sentences for people; nothing is computed there
TIMEOUT_S = 600  # of the processor's time, so that a busy machine kills no mutant
# Exit status of a run -> how it ended. Anything else is a fault of this script and counts as
# survived. A crash counts if it comes twice.
ENDS = {0: "passed", 1: "failed a test", 2: "failed to import", -signal.SIGPROF: "timed out"}
ENDS |= dict.fromkeys((-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGFPE), "crashed")

# "file: statement | before -> after" of changes that leave every promised behaviour as it was, and
# why. The statement is written as ast.unparse writes it, whatever lines it covers in its file.
EQUIVALENT: dict[str, str] = {
    "advantages.py: k = mu * (1 - mu) / variance - 1 if variance > MIN_BETA_VARIANCE else "
    "torch.zeros_like(mu) | variance > MIN_BETA_VARIANCE -> "
    "variance >= MIN_BETA_VARIANCE": "between rounding and means that differ, where none is",
    "advantages.py: spread = group_std(reward_B, torch.zeros_like(samples.group_B)) + STD_EPSILON "
    "| torch.zeros_like(samples.group_B) -> "
    "torch.ones_like(samples.group_B)": "one group, whatever its number",
    "advantages.py: variance = mean_P.var() if len(mean_P) > 1 else torch.zeros_like(mu) | "
    "torch.zeros_like(mu) -> "
    "torch.ones_like(mu)": "variance 1 gives k < 0, held at alpha = beta = 1 like variance 0",
    "batch.py: while back < self.longest: | back < self.longest -> "
    "back <= self.longest": "one more round, in which no token is that far into its span",
    "looks.py: last_N = torch.cat([square_N[1:] > (1 + 2 * SAME) * square_N[:-1], "
    "torch.tensor([True])]) | square_N[1:] > (1 + 2 * SAME) * square_N[:-1] -> "
    "square_N[1:] >= (1 + 2 * SAME) * square_N[:-1]": "at the very bound of what is rounding",
    "objective.py: for key in zip(samples.group_B.tolist(), samples.sender_B.tolist(), "
    "strict=True): | True -> False": "samples are of one length",
    "objective.py: for key in zip(samples.group_B.tolist(), samples.sender_B.tolist(), "
    "strict=True): | zip(samples.group_B.tolist(), samples.sender_B.tolist(), strict=True) -> "
    "zip(samples.group_B.tolist(), samples.sender_B.tolist())": "samples are of one length",
    "objective.py: close = difflib.get_close_matches(name, "
    "known, n=1) | 1 -> 2": "only the first match is used",
    "objective.py: close = difflib.get_close_matches(name, known, n=1) | "
    "difflib.get_close_matches(name, known, n=1) -> "
    "difflib.get_close_matches(name, known)": "only the first match is used",
    "objective.py: return group_sum((~silent_B).float(), terms.pair_B) == 0 | "
    "(~silent_B).float() -> ~silent_B": "a sum of bools is whether there is one",
    "ratios.py: together_B = torch.zeros_like(batch.terms.pair_B) | "
    "torch.zeros_like(batch.terms.pair_B) -> "
    "torch.ones_like(batch.terms.pair_B)": "one group, whatever its number",
    "ratios.py: log_ratio_BT = batch.at_start().log_ratio_BT.detach() | "
    "batch.at_start().log_ratio_BT.detach() -> "
    "batch.at_start().log_ratio_BT": "only compared, and a comparison has no gradient",
    "ratios.py: positive_B1 = batch.advantage_B[:, None] > 0 | "
    "batch.advantage_B[:, None] > 0 -> batch.advantage_B[:, None] >= 0": "times A = 0",
}

DROPPED_CALLS = {"detach", "clamp", "abs", "double", "float", "exp", "log", "sqrt"}
SWAPPED_NAMES = {
    "min": "max",
    "minimum": "maximum",
    "ones_like": "zeros_like",
    "amax": "amin",
    "append": "clear",
}
SWAPPED_NAMES |= {new: old for old, new in SWAPPED_NAMES.items()}
COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutant:
    """One change in a statement of a file: what stood there and what stands there now."""

    file: str
    line: int
    statement: str
    change: str
    begin: int  # the first line of the statement
    node: int  # position in the walk over the module's tree
    option: int  # which of the node's alternatives

    @property
    def key(self) -> str:
        return f"{self.file}: {self.statement} | {self.change}"


def alternatives(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that may stand in place of this one."""
    if isinstance(node, ast.Compare):
        for operator in COMPARISONS.get(type(node.ops[0]), ()):
            yield ast.Compare(node.left, [operator(), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        yield ast.AugAssign(node.target, OPERATORS[type(node.op)](), node.value)
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.If):
        yield ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Constant):
        yield from (ast.Constant(value) for value in other_constants(node.value))
    elif isinstance(node, ast.Call):
        yield from other_calls(node)


def other_constants(value: object) -> Iterator[object]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1 if isinstance(value, int) else (value * 1.5 or 1.0)
        if value:
            yield type(value)(0)
    elif isinstance(value, str):
        yield f"XX{value}"


def other_calls(node: ast.Call) -> Iterator[ast.AST]:
    if isinstance(node.func, ast.Attribute):
        if node.func.attr in DROPPED_CALLS:
            yield node.func.value
        if node.func.attr in SWAPPED_NAMES:
            yield ast.Call(
                ast.Attribute(node.func.value, SWAPPED_NAMES[node.func.attr], ast.Load()),
                node.args,
                node.keywords,
            )
        if node.func.attr == "where":
            yield ast.Call(node.func, [node.args[0], node.args[2], node.args[1]], node.keywords)
        if node.func.attr == "clamp" and len(node.args) == 2:
            yield ast.Call(node.func, node.args[::-1], [])
    elif isinstance(node.func, ast.Name) and node.func.id in SWAPPED_NAMES:
        yield ast.Call(ast.Name(SWAPPED_NAMES[node.func.id], ast.Load()), node.args, node.keywords)
    for k, keyword in enumerate(node.keywords):
        rest = node.keywords[:k] + node.keywords[k + 1 :]
        if keyword.arg in ("min", "max"):
            yield ast.Call(
                node.func,
                node.args,
                [*rest, ast.keyword(SWAPPED_NAMES[keyword.arg], keyword.value)],
            )
        elif keyword.arg != "device":  # one device in the tests
            yield ast.Call(node.func, node.args, rest)


def mutable_nodes(tree: ast.Module) -> list[tuple[ast.AST, ast.stmt]]:
    """The tree's nodes in a fixed order, each with the statement it stands in.

    Docstrings, annotations, decorators, imports and type aliases are left out.
    """
    mutable: list[tuple[ast.AST, ast.stmt]] = []

    def visit(node: ast.AST, statement: ast.stmt) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if isinstance(node, ast.Assign) and is_type_alias(node.value):
            return
        if isinstance(node, ast.stmt):
            statement = node
        mutable.append((node, statement))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, statement)

    for node in tree.body:
        visit(node, node)
    return mutable


def is_type_alias(value: ast.AST) -> bool:
    return isinstance(value, ast.BinOp) and all(
        isinstance(part, ast.BinOp | ast.Name | ast.BitOr | ast.Load) for part in ast.walk(value)
    )


@functools.cache
def source_of(path: Path) -> str:
    """Read once, so that a change of the source during the run moves no mutant."""
    return path.read_text()


def mutants_of(path: Path) -> list[Mutant]:
    return [
        Mutant(
            file=path.name,
            line=node.lineno,
            statement=shown(statement),
            change=f"{shown(node)} -> {shown(other)}",
            begin=statement.lineno,
            node=index,
            option=option,
        )
        for index, (node, statement) in enumerate(mutable_nodes(ast.parse(source_of(path))))
        for option, other in enumerate(alternatives(node))
    ]


def shown(node: ast.AST) -> str:
    """The node as source on one line, a compound statement without what stands under it."""
    source = ast.unparse(ast.fix_missing_locations(copy.deepcopy(node)))
    if isinstance(node, ast.If):
        return f"if {ast.unparse(node.test)}"
    if hasattr(node, "body") and isinstance(node, ast.stmt):
        source = source.splitlines()[0]
    return " ".join(source.split())


def mutated(path: Path, mutant: Mutant) -> ast.Module:
    tree = ast.parse(source_of(path))
    node, _ = mutable_nodes(tree)[mutant.node]
    other = list(alternatives(node))[mutant.option]
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is node:
                setattr(parent, name, other)
            elif isinstance(value, list):
                setattr(parent, name, [other if child is node else child for child in value])
    return ast.fix_missing_locations(tree)


class MutantLoader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a changed tree and leaves the others alone."""

    def __init__(
        self, path: Path, tree: ast.Module, names: dict[str, object] | None = None
    ) -> None:
        self.module, self.path, self.tree = f"{PACKAGE}.{path.stem}", path, tree
        self.names = names or {}  # that the tree uses and does not make

    def find_spec(
        self, name: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.util.spec_from_file_location(name, self.path, loader=self)
            if name == self.module
            else None
        )

    def exec_module(self, module: object) -> None:
        module.__dict__.update(self.names)
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)


Statement = tuple[str, int]  # file and first line
Reached = dict[str, tuple[float, list[Statement]]]  # test -> seconds and statements


class Telling(ast.NodeTransformer):
    """Has every statement of a function say that it is run."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if not isinstance(node, ast.Module | ast.ClassDef | ast.Lambda | ast.IfExp):
            for name in ("body", "orelse", "finalbody"):
                setattr(node, name, [*self.told(getattr(node, name, []))])
        return node

    def told(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for statement in body:
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not is_text:  # a docstring stays first
                place = ast.Constant(statement.lineno)
                yield ast.Expr(ast.Call(ast.Name(TELL, ast.Load()), [place], []))
            yield statement


class Reach:
    """A plugin for the source as it is: which statements each test runs, and how long it takes."""

    def __init__(self) -> None:
        self.said: Reached = {}
        self.lately: set[Statement] = set()
        for path in SOURCE.glob("*.py"):
            tree = ast.fix_missing_locations(Telling().visit(ast.parse(source_of(path))))
            tell = lambda line, file=path.name: self.lately.add((file, line))
            sys.meta_path.insert(0, MutantLoader(path, tree, {TELL: tell}))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.lately.clear()
        began = time.process_time()
        try:
            return (yield)
        finally:
            self.said[item.nodeid] = (time.process_time() - began, sorted(self.lately))


class Chosen:
    """A plugin for a mutant: the tests that it meets, in order, and which of them kills it."""

    def __init__(self, order: list[str]) -> None:
        self.order, self.killer = order, ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = [found[name] for name in self.order if name in found]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.killer = report.nodeid


class Within:
    """A plugin that collects every test, and runs none: it tries mutants of functions on them."""

    def __init__(self, mutants: list[Mutant], order: Order, jobs: int) -> None:
        self.mutants, self.order, self.jobs = mutants, order, jobs
        self.said: list[int] = []  # which of the mutants survived
        self.killer = ""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        gc.freeze()
        survived = survivors_of(self.mutants, self.order, self.jobs, self.meet)
        self.said = [self.mutants.index(mutant) for mutant in survived]
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.killer = report.nodeid

    def meet(self, mutant: Mutant, tests: list[str]) -> tuple[int, str]:
        change_in_place(mutant)
        items = [self.items[name] for name in tests]
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.killer:
                return 1, self.killer
        return 0, ""


def change_in_place(mutant: Mutant) -> None:
    """Give the functions of an imported module the code that the mutant's tree has for them."""
    path = SOURCE / mutant.file
    codes = dict(codes_of(compile(mutated(path, mutant), str(path), "exec")))
    functions = [
        function
        for function in functions_of(vars(sys.modules[f"{PACKAGE}.{path.stem}"]))
        if function.__code__.co_filename == str(path)
    ]
    assert any(f.__code__ != codes[f.__code__.co_qualname] for f in functions), "nothing changed"
    for function in functions:
        function.__code__ = codes[function.__code__.co_qualname]


def codes_of(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield part.co_qualname, part
            yield from codes_of(part)


def functions_of(names: Mapping[str, object]) -> Iterator[FunctionType]:
    """Those of a module or a class and of its classes, methods and properties among them."""
    for value in names.values():
        value = getattr(value, "fget", getattr(value, "__func__", value))
        if isinstance(value, FunctionType):
            yield value
        elif isinstance(value, type) and value.__module__.startswith(PACKAGE):
            yield from functions_of(vars(value))


class Order:
    """Which tests a mutant meets, and in which order."""

    def __init__(self, reached: Reached, patience_s: float) -> None:
        self.seconds = {name: seconds for name, (seconds, _) in reached.items()}
        self.patience_s = patience_s
        self.tests_of: dict[Statement, set[str]] = {}
        for name, (_, statements) in reached.items():
            for file, line in statements:
                self.tests_of.setdefault((file, line), set()).add(name)
        self.kills: Counter[tuple[str, str]] = Counter()  # by file and test

    def within_a_function(self, mutant: Mutant) -> bool:
        """A statement that no test runs is run at import, or never."""
        return (mutant.file, mutant.begin) in self.tests_of

    def of(self, mutant: Mutant) -> list[str]:
        tests = self.tests_of.get((mutant.file, mutant.begin), set(self.seconds))
        about = f"test_{mutant.file}::"  # the tests of the module itself
        rank = lambda name: (-self.kills[mutant.file, name], about not in name, self.seconds[name])
        ranked = sorted(tests, key=rank)
        spent = itertools.accumulate(self.seconds[name] for name in ranked)
        return [name for name, s in zip(ranked, spent, strict=True) if s <= self.patience_s]


Meet = Callable[[Mutant, list[str]], tuple[int, str]]  # -> pytest's exit status, and the killer


def meet_anew(mutant: Mutant, tests: list[str]) -> tuple[int, str]:
    """Import the mutant, and collect one file of tests after the other."""
    path = SOURCE / mutant.file
    sys.meta_path.insert(0, MutantLoader(path, mutated(path, mutant)))
    plugin = Chosen(tests)
    for file in dict.fromkeys(name.partition("::")[0] for name in tests):
        status = int(pytest.main([*PYTEST_OPTIONS, str(ROOT / file)], plugins=[plugin]))
        if status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):  # their rows may have gone
            return status, plugin.killer
    return 0, ""


def start(mutant: Mutant, tests: list[str], meet: Meet) -> tuple[int, int]:
    """Fork a child in which the mutant meets the tests. Its status is pytest's; the killer's name
    comes through the second number, a pipe.
    """
    told, tell = os.pipe()
    child = os.fork()
    if child:
        os.close(tell)
        return child, told
    signal.setitimer(signal.ITIMER_PROF, TIMEOUT_S)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    status = 70
    try:
        status, killer = meet(mutant, tests)
        os.write(tell, killer.encode())
    finally:
        os._exit(status)


def with_all_tests(plugin_of: Callable[[], Reach | Within]) -> Any | None:
    """What the plugin has to say when pytest has had all test files; None: a test failed. In a
    child, so that nothing is imported here.
    """
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        status = 70
        try:
            plugin = plugin_of()
            paths = [str(ROOT / "tests" / "objectives" / f"test_{name}.py") for name in TESTS]
            with open(os.devnull, "w") as silence, contextlib.redirect_stdout(silence):
                status = int(pytest.main([*PYTEST_OPTIONS, *paths], plugins=[plugin]))
            with os.fdopen(tell, "w") as pipe:
                json.dump(plugin.said, pipe)
        finally:
            os._exit(status)
    os.close(tell)
    with os.fdopen(told) as pipe:
        words = pipe.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(words) if ENDS.get(ended) == "passed" else None


def digest() -> str:
    """Of what the result hangs on: source, tests and settings."""
    paths = [*SOURCE.glob("*.py"), *(ROOT / "tests" / "objectives").glob("*.py")]
    paths += [ROOT / "tests" / "conftest.py", ROOT / "tests" / "marks.py", ROOT / "pyproject.toml"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()


def reached(kept: Path | None) -> Reached | None:
    """What every test runs of the source as it is; None: they do not pass. What is kept in a file
    counts as long as the digest is the same.
    """
    if kept and kept.exists():
        known = json.loads(kept.read_text())
        if known["digest"] == digest():
            return {
                name: (seconds, [*map(tuple, at)]) for name, (seconds, at) in known["tests"].items()
            }
    print("the tests, on the source as it is", file=sys.stderr, flush=True)
    before, tests = digest(), with_all_tests(Reach)
    if kept and tests is not None:
        kept.write_text(json.dumps({"digest": before, "tests": tests}))
    return tests


def survivors_of(mutants: list[Mutant], order: Order, jobs: int, meet: Meet) -> list[Mutant]:
    waiting, running, survived, ends = list(reversed(mutants)), {}, [], Counter()
    crashed: set[Mutant] = set()
    began = time.monotonic()
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            child, told = start(mutant, order.of(mutant), meet)
            running[child] = mutant, told
        child, status = os.wait()
        mutant, told = running.pop(child)
        with os.fdopen(told) as pipe:
            order.kills[mutant.file, pipe.read()] += 1
        code = os.waitstatus_to_exitcode(status)
        end = ENDS.get(code, f"broken, status {code}:")
        if end == "crashed" and mutant not in crashed:
            crashed.add(mutant)
            waiting.append(mutant)
            continue
        ends[end] += 1
        done = ends.total()
        if done % 20 == 0:
            left_s = (time.monotonic() - began) / done * (len(mutants) - done)
            words = f"{done} of {len(mutants)}, {left_s / 60:.0f} min left, {len(survived)} survive"
            print(words, file=sys.stderr, flush=True)
        if end == "passed" or code not in ENDS:
            survived.append(mutant)
            words = f"{end} {mutant.file}:{mutant.line}  {mutant.change}"
            print(words, file=sys.__stdout__, flush=True)
    words = ", ".join(f"{count} {end}" for end, count in ends.items())
    print(words or "none", file=sys.__stdout__, flush=True)
    return survived


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation testing of motley.objectives.")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument(
        "--only", default="", help="only mutants whose 'file:line change' contains this"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and run none")
    parser.add_argument("--keep", type=Path, help="keep here what the tests run, for the next time")
    parser.add_argument(
        "--patience",
        type=float,
        default=math.inf,
        help="seconds of tests after which a mutant counts as survived; for a quick look",
    )
    options = parser.parse_args()
    modules = sorted(path for path in SOURCE.glob("*.py") if path.name not in WORDS)
    every = [m for path in modules for m in mutants_of(path)]
    unmatched = sorted(set(EQUIVALENT) - {m.key for m in every})
    if unmatched:
        print("EQUIVALENT names changes that no mutant makes; correct or remove:")
        print(*(f"  {key}" for key in unmatched), sep="\n")
        return 2
    mutants = [m for m in every if options.only in f"{m.file}:{m.line} {m.change}"]
    if options.list:
        print("\n".join(f"{m.file}:{m.line}  {m.change}" for m in mutants))
        return 0
    torch.set_num_threads(1)
    gc.freeze()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    began, before = time.monotonic(), digest()
    if (tests := reached(options.keep)) is None:
        print("the tests fail on the source as it is; nothing to measure")
        return 2
    counted = [m for m in mutants if m.key not in EQUIVALENT]
    survived = all_survivors(counted, Order(tests, options.patience), options.jobs)
    if digest() != before:
        print("the source or the tests changed during the run; run again")
        return 2
    return report(mutants, survived, time.monotonic() - began, options.json)


def all_survivors(mutants: list[Mutant], order: Order, jobs: int) -> list[Mutant]:
    within = [m for m in mutants if order.within_a_function(m)]
    anew = [m for m in mutants if not order.within_a_function(m)]
    survived = with_all_tests(lambda: Within(within, order, jobs))
    assert survived is not None, "the loop over mutants itself ended in a failure"
    return [within[k] for k in survived] + survivors_of(anew, order, jobs, meet_anew)


def report(mutants: list[Mutant], survived: list[Mutant], seconds: float, path: Path | None) -> int:
    counted = [m for m in mutants if m.key not in EQUIVALENT]
    print(
        f"\n{'module':<16}{'mutants':>8}{'equivalent':>12}{'killed':>8}{'survived':>10}{'score':>8}"
    )
    for name in [*sorted({m.file for m in mutants}), ""]:
        total = sum(name in m.file for m in mutants)
        tried = sum(name in m.file for m in counted)
        left = sum(name in m.file for m in survived)
        score = 1 - left / max(1, tried)
        print(
            f"{name or 'all':<16}{total:>8}{total - tried:>12}"
            f"{tried - left:>8}{left:>10}{score:>8.1%}"
        )
    for m in survived:
        print(f"survived  {m.file}:{m.line}  {m.change}")
    for m in mutants:
        if m.key in EQUIVALENT:
            print(f"equivalent  {m.file}:{m.line}  {m.change}  ({EQUIVALENT[m.key]})")
    score = 1 - len(survived) / max(1, len(counted))
    if path:
        summary = {
            "mutants": len(mutants),
            "equivalent": len(mutants) - len(counted),
            "killed": len(counted) - len(survived),
        }
        path.write_text(
            json.dumps(
                summary
                | {"score": score, "seconds": seconds, "survived": [m.key for m in survived]}
            )
        )
    print(f"{score:.1%} of {len(counted)} mutants killed in {seconds:.0f} s")
    return 0 if score >= REQUIRED_SCORE else 1


if __name__ == "__main__":
    sys.exit(main())
