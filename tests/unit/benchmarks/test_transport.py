"""The benchmark of the wire: its ratios are turned the right way."""

from benchmarks.transport import rows_of, table


def test_ratios_and_what_failed() -> None:
    rates = {"memcpy": [10.0, 20.0, 10.0], "shm": [9.0, 18.0, 9.0], "grpc": [1.0, 2.0, 2.0]}
    trips = {"what": "trips", "trainers": 8, "step_seconds": 0.1}
    answers = [
        {"what": "bytes", "payload_bytes": 2**20, "gigabytes_per_second": rates},
        trips | {"milliseconds": [1.0] * 50 + [1.5] * 49 + [6.0, 9.0]},
        trips | {"failed": "no answer"},
    ]
    rows = [row for answer in answers for row in rows_of(answer)]
    assert [(row.ratio, row.floor, row.goal) for row in rows] == [
        (0.9, None, None),
        (0.1, 0.08, 0.15),
        (2.0, 1.0, 3.0),
        (0.5, None, None),
    ]
    assert "8 trainers, a step every 100 ms: no answer" in table(rows, answers)
