"""A supervisor whose workers are in a child process: the same results as with threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib.util
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import (
    BadRequest,
    WorkerFailed,
)

spec = importlib.util.spec_from_file_location("process_supervisors", Path(__file__).with_name("process_supervisors.py"))
supervisors = importlib.util.module_from_spec(spec)
spec.loader.exec_module(supervisors)
ROOT, PATIENCE, open_supervisor = supervisors.ROOT, supervisors.PATIENCE, supervisors.open_supervisor
child_of, pair, vector, close = supervisors.child_of, supervisors.pair, supervisors.vector, supervisors.close


def test_products_come_out_as_numpy_has_them(open_supervisor, rng):
    with open_supervisor(streams=3) as sup:
        assert child_of(sup) != os.getpid()
        work = [pair(sup.device, rng) for _ in range(40)]
        for _ in range(3):
            for future, (_, right) in zip(sup.submit_many([request for request, _ in work]), work, strict=True):
                assert close(future.result(PATIENCE), right)
        a, b = work[0][0].a, work[0][0].b
        fresh = sup.submit(dp.MatmulRequest(a, b, epilogue=dp.Epilogue.RELU)).result(PATIENCE)
        assert close(fresh, np.maximum(work[0][1], 0))
        assert (sup.stats().done, sup.stats().failed, sup.generation) == (121, 0, 1)


def test_several_outputs_come_back(open_supervisor, rng):
    with open_supervisor() as sup:
        request, right = pair(sup.device, rng)
        both = dp.MatmulRequest(request.a, request.b, epilogue=dp.Epilogue.GELU_AUX)
        _, aux = sup.submit(both).result(PATIENCE)
        assert close(aux, right)


def test_a_refusal_of_the_table_reaches_the_future(open_supervisor):
    with open_supervisor() as sup:
        a = sup.device.array(np.ones((4, 4)), "f64")
        b = sup.device.array(np.ones((4, 4)), "f32")
        with pytest.raises(dp.errors.NoRow, match="needs dtypes"):
            sup.submit(dp.MatmulRequest(a, b)).result(PATIENCE)


def test_asyncio_and_concurrent_futures_wait_for_results(open_supervisor, rng):
    async def main(sup, request):
        return await asyncio.wait_for(sup.submit(request), PATIENCE)

    with open_supervisor() as sup:
        request, right = pair(sup.device, rng)
        assert close(asyncio.run(main(sup, request)), right)
        done, _ = concurrent.futures.wait([sup.submit(request) for _ in range(10)], PATIENCE)
        assert len(done) == 10


def test_a_callback_may_submit(open_supervisor, rng):
    ended = threading.Event()
    with open_supervisor(streams=1) as sup:
        request, _ = pair(sup.device, rng)

        def more(_):
            sup.submit(request).add_done_callback(lambda _: ended.set())

        sup.submit(request).add_done_callback(more)
        assert ended.wait(PATIENCE)


def test_threads_submit_at_once(open_supervisor, rng):
    with open_supervisor(streams=4, queue_size=32) as sup:
        work = [pair(sup.device, rng) for _ in range(8)]
        failed = []

        def go(request, right):
            failed.extend(_ for _ in range(50) if not close(sup.submit(request).result(PATIENCE), right))

        threads = [threading.Thread(target=go, args=one) for one in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not failed
        assert sup.stats().done == 400


def test_what_is_no_request_fails_and_is_not_waited_for(open_supervisor):
    with open_supervisor() as sup:
        futures = [sup.submit(None), sup.submit(None, timeout=60), *sup.submit_many([None, 0, "x"])]
        for future in futures:
            with pytest.raises(BadRequest, match=r"expected a dispatch\.Request"):
                future.result(60)


def test_memory_of_other_devices_and_direct_calls_are_refused(open_supervisor, rng):
    with open_supervisor() as sup:
        elsewhere, _ = pair(dp.device("host"), rng)
        with pytest.raises(BadRequest, match=r"sup\.device\.array"):
            sup.submit(elsewhere).result(PATIENCE)
        request, _ = pair(sup.device, rng)
        with pytest.raises(BadRequest, match=r"sup\.submit"):
            dp.run(request)
        with pytest.raises(BadRequest, match=r"sup\.submit"):
            dp.prepare(request)
        with pytest.raises(BadRequest, match=r"dispatch\.Request"):
            sup.submit("a request").result(PATIENCE)


def test_a_class_that_the_child_cannot_import_is_refused_with_a_hint(trouble):
    sup = dp.Supervisor("host", streams=1, isolation="process")
    sys.path.remove(str(ROOT / "tests"))
    try:
        with dp.Supervisor("host", streams=1, isolation="process") as blind:
            one = vector(blind.device)
            with pytest.raises(BadRequest, match="setup="):
                blind.submit(trouble.Trouble("fine", one, vector(blind.device))).result(PATIENCE)
    finally:
        sys.path.insert(0, str(ROOT / "tests"))
        sup.close()


def test_a_setup_that_fails_is_raised_where_the_supervisor_is_made(capfd, tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    cause = r"before it was ready: setup: importing 'needs_more' raised ModuleNotFoundError\(.*no_such_module"
    with pytest.raises(WorkerFailed, match=cause) as caught:
        dp.Supervisor("host", isolation="process", setup=("needs_more",))
    assert any("needs_more.py" in note and "import no_such_module" in note for note in caught.value.__notes__)
    assert capfd.readouterr().err == ""


def test_a_child_that_ctrl_c_meets_as_it_starts_says_nothing(capfd, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with dp.Supervisor("host", isolation="process", streams=1) as sup:
        assert sup.submit(dp.SoftmaxRequest(vector(sup.device))).result(PATIENCE) is not None
    sup.device.close()
    assert capfd.readouterr().err == ""
