"""Defects of plan_relocation.py and learner.py that the checks of the files beside must find."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dispatch.execute import cuda_executor, learner, plan_relocation


def module_at(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


later, recall = module_at("test_relocated_later"), module_at("test_relocation_recall")
plans = later.plans
stand_in, driver, executor, logged = plans.stand_in, plans.driver, plans.executor, plans.logged


def every_check(executor, driver, logged):
    plans.check_steps(executor)
    learner._words.clear()
    recall.check_recall(executor)
    for what in recall.WRONG:
        learner._words.clear()
        recall.check_wrong_recall(executor, what)
    executor.relocations.checked = 0
    later.check_comparisons(executor)
    for what in (*later.DIFFERENT, "fewer"):
        later.check_difference(executor, logged, what)
    executor.relocations.differed = 0
    logged.clear()
    later.check_edges(executor, logged)
    executor.relocations.differed = 0
    logged.clear()
    later.check_status(executor, driver, logged)
    plans.test_numbers_in_device_memory_have_a_graph_each(executor)
    executor.numbers_in_memory = 0
    plans.test_each_form_has_its_own_graph_and_the_latest_is_first(executor)
    executor.seen.clear()
    executor.relocations.refused = 0
    plans.test_refusals_back_off(executor)
    plans.test_a_real_call_that_is_not_what_was_predicted_is_refused(executor, driver, "image")


EQUAL = "[(n.kind, n.form, n.image) for n in nodes] == ["
DEFECTS = {
    "no capture proves": ("", "PROVING", "0"),
    "too early": ("", "FIRST", "4"),
    "a step at each call": ("", "EVERY", "1"),
    "a comparison is always equal": ("PlanRelocation", f"if {EQUAL}", f"if nodes or {EQUAL}"),
    "images are not compared": ("PlanRelocation", "n.form, n.image) for n", "n.form, predicted[nodes.index(n)]) for n"),
    "forms are not compared": ("PlanRelocation", EQUAL, EQUAL.replace("n.form", "graph.nodes[nodes.index(n)].form")),
    "edges are not compared": ("PlanRelocation", "captured.edges == graph.edges", "graph.edges is not None"),
    "what differs is compared again": ("PlanRelocation", "self._refuse(plan, None, why)", "graph.compared()"),
    "other graphs stay": ("PlanRelocation", "for other in tuple(self.graphs):", "for other in (graph,):"),
    "comparisons never come": ("PlanRelocation", "counts.until_check <= 0 and", "False and"),
    "a status is passed over": ("PlanRelocation", "if counts.status or", "if"),
    "recalled without proof": ("Learner", "if not alike or [", "if [] and ["),
    "recalled and not used": ("Learner", "        self._words = words\n", "        del words\n"),
    "refusals do not back off": (
        "PlanRelocation",
        "refused:\n            self._every = min(2 *",
        "refused:\n            max(2 *",
    ),
    "numbers in memory are not fixed": (
        "PlanRelocation",
        "self._exact.add(form)",
        "return False",
    ),
    "any number of forms": ("PlanRelocation", ">= MAX_FORMS", ">= 99"),
    "the latest is not first": ("PlanRelocation", "self.graphs.insert(0, graph)", "self.graphs.append(graph)"),
    "other forms' graphs are not asked": ("PlanRelocation", "self.graphs[1:]", "self.graphs[1:1]"),
    "the real call is not looked at": ("Learner", "!= predicted:", "== []:"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found(monkeypatch, executor, driver, logged, defect):
    name, old, new = DEFECTS[defect]
    if name:
        module = plan_relocation if hasattr(plan_relocation, name) else learner
        stand_in.mutate(monkeypatch, module, name, old, new)
        monkeypatch.setattr(cuda_executor, "PlanRelocation", plan_relocation.PlanRelocation)
    else:
        monkeypatch.setattr(plan_relocation if hasattr(plan_relocation, old) else learner, old, int(new))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        every_check(executor, driver, logged)


def test_without_a_defect_every_check_passes(executor, driver, logged):
    every_check(executor, driver, logged)
