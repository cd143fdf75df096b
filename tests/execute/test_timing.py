"""The stopwatch."""

from smupar.execute.timing import in_turns, seconds_of


def test_calls_are_measured_in_turns_and_count_by_their_median():
    order = []
    times = {"a": iter((3.0, 1.0, 2.0)), "b": iter((9.0, 8.0, 4.0))}
    calls = {name: (lambda name=name: order.append(name)) for name in times}

    def measure(name, call):
        call()
        return next(times[name])

    assert in_turns(calls, 3, measure) == {"a": 2.0, "b": 8.0}
    assert order == ["a", "b"] * 3
    times |= {"a": iter((3.0, 1.0)), "b": iter((9.0, 8.0))}
    assert in_turns(calls, 2, measure, pick=min) == {"a": 1.0, "b": 8.0}


def test_seconds_are_of_one_call():
    calls = []
    assert 0 < seconds_of(lambda: calls.append(0), 5) < 1
    assert len(calls) == 5
