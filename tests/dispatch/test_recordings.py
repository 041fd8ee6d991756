"""Recordings of this library's own: lost ones are repeated, and none meets a wait for the device."""

from __future__ import annotations

import itertools
import linecache
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from dispatch.device import recordings as recordings_module
from dispatch.device.recordings import Recordings
from dispatch.execute.cuda_graph import TRIES

PATIENCE = 120  # seconds, on a machine that has other things to do


def test_a_recording_that_is_lost_is_repeated_then_given_up_and_errors_are_raised(driver, run):
    def work(dev):
        executor = dev.executor()
        target, tries = executor.target.value, []

        def lost():
            tries.append(executor.target.value)
            if len(tries) <= losses:
                driver.lose("another library")

        losses = 0
        for losses, is_recorded in ((0, True), (TRIES - 1, True), (TRIES, False)):  # noqa: B007  # `lost` reads it
            tries.clear()
            assert (executor.capture(lost) is not None) == is_recorded
            assert executor.target.value == target not in tries
        with pytest.raises(ZeroDivisionError):
            executor.capture(lambda: 1 // 0)
        assert executor.target.value == target
        assert not driver.capturing
        assert executor.capture(lambda: None) is not None
        driver.lost.clear()

    run(work)


def test_a_wait_for_the_device_and_a_recording_never_meet(run):
    def work(dev):
        stop = threading.Event()

        def record():
            dev.activate()
            for _ in range(150):
                assert dev.executor().capture(lambda: None) is not None

        def wait():
            dev.activate()
            while not stop.is_set():
                dev.synchronize()

        with ThreadPoolExecutor(5) as pool:
            waiting = pool.submit(wait)
            recording = [pool.submit(record) for _ in range(4)]
            try:
                for one in recording:
                    one.result()
            finally:
                stop.set()
            waiting.result()

    run(work)


def test_who_waits_for_the_device_waits_for_a_recording_to_end(run):
    def work(dev):
        started, ended = threading.Event(), threading.Event()

        def enqueue():
            started.set()
            while not dev.recordings._losing and not ended.is_set():
                time.sleep(0)  # until the other thread is there

        def wait():
            dev.activate()
            started.wait()
            try:
                dev.synchronize()
            finally:
                ended.set()

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(wait)
            assert dev.executor().capture(enqueue) is not None
            waiting.result()

    run(work)


def test_two_recordings_that_run_out_of_memory_do_not_wait_for_each_other():
    recordings, both, over = Recordings(), threading.Barrier(2), []

    def record():
        with recordings.record():
            both.wait(PATIENCE)
            with recordings.exclude():
                over.append(threading.get_ident())

    threads = [threading.Thread(target=record, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(over) == 2
    with recordings.exclude():
        assert not recordings._recording


def test_recordings_may_be_made_inside_of_one_another_and_wait_for_no_wait_of_their_own_thread():
    recordings = Recordings()
    with recordings.record(), recordings.exclude(), recordings.record():
        pass
    with recordings.exclude(), recordings.exclude():
        pass
    with pytest.raises(ZeroDivisionError), recordings.record():
        _ = 1 // 0
    with recordings.exclude():
        pass


class Interrupt:
    """Ctrl-C at line event number `at` of recordings.py, but for those at which the interpreter takes no signal."""

    def __init__(self, at):
        self.at, self.count, self.last, self.came = at, 0, 0, False

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename != recordings_module.__file__:
            return None
        line, name = frame.f_lineno, linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        is_exit = name.startswith("with ") and line < self.last
        if event == "line" and not is_exit and name != "try:" and ".pop(" not in name:
            self.count += 1
            if self.count == self.at:
                self.came = True
                raise KeyboardInterrupt
        self.last = line if event == "line" else self.last
        return self


@pytest.mark.parametrize("kind", ["record", "exclude"])
def test_an_interrupt_at_every_line_of_a_recording_lets_others_record_and_wait(kind):
    for at in itertools.count(1):
        recordings, interrupt, before, over = Recordings(), Interrupt(at), sys.gettrace(), []
        sys.settrace(interrupt)
        with suppress(KeyboardInterrupt), getattr(recordings, kind)():
            pass
        sys.settrace(before)

        def use(recordings=recordings, over=over):
            with recordings.exclude():
                over.append(0)
            with recordings.record():
                over.append(1)

        thread = threading.Thread(target=use, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert over == [0, 1]
        if not interrupt.came:
            break
    assert at > 5
