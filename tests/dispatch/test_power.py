"""Whether the cases of each row would see a fault: wrong results are given to each case's own check, on the host.

Cases are held to what a GPU's libraries may do, which is the most that any row allows. A mutation whose result is the
right one once rounded cannot be seen by anybody and does not count; but each must be seen in some case of each row.
"""

import importlib
import os
from dataclasses import replace

import pytest

import dispatch
from dispatch import TABLE
from dispatch.ops.matmul.tree_cases import quantized_cases, tree_cases
from dispatch.ops.rnn.cases import RnnCase
from dispatch.row_check import cases_of
from dispatch.testing.check import MadeCase
from dispatch.testing.mutations import made, verdicts
from dispatch.testing.roundoff import as_on_a_gpu

pytestmark = pytest.mark.exhaustive

ELSEWHERE = {
    "cudnn_graph": "users' own graphs have no cases: tests/dispatch/cudnn holds their nodes",
    "random_poisson curand": "cuRAND's way to a number is its own: its cases hold their mean and their spread",
    **dict.fromkeys(("send", "recv", "barrier"), "they give nothing: tests/dispatch/world sees what comes"),
    "dropout_states": "a state is the library's own: its cases hold the masks drawn from it against another's",
}
EVERY = 1 if os.environ.get("EVERYWHERE") else 3


def family(row):
    return ".".join(row.call.__module__.split(".")[:3])


def mutations_of(row):
    """The module with a family's mutations: that of its cases, where the family is small."""
    cases = importlib.import_module(f"{family(row)}.cases")
    return cases if hasattr(cases, "MUTATIONS") else importlib.import_module(f"{family(row)}.mutations")


def groups():
    """Rows with the same cases, by the names of the first; those for the host are the GPU's but for the library."""
    found = {}
    for row in TABLE:
        if ELSEWHERE.keys().isdisjoint((row.op, f"{row.op} {row.stands_for or row.library}")):
            cases = cases_of(row)
            found.setdefault((row.op, row.dtypes, tuple(map(repr, cases))), pytest.param(row, cases, id=row.name))
    return list(found.values())


def concerns(case, mutations, rng):
    """Whether any of the mutations is one of a case: of most cases that is told by the request, without a reference.

    Bounds of products take ten times as long, and of what no case of a row has before, few others have any.
    """
    if isinstance(case, (MadeCase, RnnCase)):  # whose request is made by their check, or is not what is mutated
        return True
    request = case.request(dispatch.device("host"), rng)
    return any(mutation(request) is not None for mutation in mutations)


def ending_soon(mutations, check):
    """The mutations, of an iteration with a limit that the check refuses anyway: a wrong one may never converge.

    It takes at most four times the right one's iterations and some more; an iteration of gmres's is a cycle of them.
    """
    request = check.request
    if not hasattr(request, "maxiter"):
        return mutations
    most = 5 * int(check.expected["iterations"]) + 50
    limit = min(request.limit, most // getattr(request, "length", 1) + 5)
    return {
        name: lambda subject, mutation=mutation: mutation(replace(subject, maxiter=limit))
        for name, mutation in mutations.items()
    }


def judge(module, cases, rng):
    """What no case sees though it shows, as lines; and the mutations that were tried, and those that were seen.

    One in `EVERY` cases tries all mutations, others in the next row and in the next run of another seed; what is not
    seen in these is tried in the rest until one sees it.
    """
    blind, seen, tried, turn = [], set(), set(), int(rng.integers(EVERY))

    def look(case, wanted):
        with as_on_a_gpu():
            check = case.check(dispatch.device("host"), rng)
        mutations = ending_soon(module.MUTATIONS, check)
        for mutation, rejected in verdicts(check, getattr(module, "named", made), mutations, wanted):
            if mutation == "none":
                assert rejected is False, f"{case.id} rejects the rounded reference"
                continue
            tried.add(mutation)
            if rejected:
                seen.add(mutation)
            elif rejected is False:
                blind.append(f"{case.id} takes: {mutation}")

    for case in cases[turn::EVERY]:
        look(case, bool)
    for number, case in enumerate(cases):
        if number % EVERY == turn or not (unseen := module.MUTATIONS.keys() - seen):
            continue
        if concerns(case, [module.MUTATIONS[name] for name in unseen], rng):
            look(case, unseen.__contains__)
    return blind, seen, tried


@pytest.mark.parametrize(("row", "cases"), groups())
def test_every_case_of_a_row_rejects_every_mutation(row, cases, rng):
    module = mutations_of(row)
    blind, seen, tried = judge(module, cases, rng)
    assert not blind, "\n".join(blind)
    assert tried & module.MUTATIONS.keys() <= seen


@pytest.mark.parametrize("case", [*tree_cases(), *quantized_cases()], ids=lambda case: case.id)
def test_every_random_tree_rejects_every_mutation(case, rng):
    blind, seen, _ = judge(importlib.import_module("dispatch.ops.matmul.mutations"), [case] * EVERY, rng)
    assert not blind, "\n".join(blind)
    assert seen
