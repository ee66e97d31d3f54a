"""Step ③: packs are whole documents, each once an epoch, and a pure function of the spec and the number."""

import hashlib
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from target_server.document_table import DocumentTable, encode_documents
from target_server.packing import Pack, PackSequence, best_fit_decreasing
from target_server.tokens_and_mask import Document


def table(lengths: list[int]) -> DocumentTable:
    """Document i holds tokens i*1000+1, i*1000+2, …; every third token is supervised."""
    documents = [
        Document(
            f"doc-{index}",
            np.arange(1, length + 1, dtype=np.int32) + index * 1000,
            (np.arange(length) % 3 == 0).astype(np.uint8),
        )
        for index, length in enumerate(lengths)
    ]
    return DocumentTable(encode_documents([(document, 0, 0) for document in documents]))


def epoch_packs(sequence: PackSequence, epoch: int) -> list[Pack]:
    return [sequence.pack(number) for number in range(sequence.total_packs(epoch), sequence.total_packs(epoch + 1))]


packings = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 128), min_size=1, max_size=60),
        "seed": st.integers(0, 2**70),
        "window_documents": st.integers(1, 70),
    }
)


@settings(max_examples=40, deadline=None)
@given(spec=packings)
def test_every_document_lies_whole_in_exactly_one_pack_of_an_epoch(spec: dict) -> None:
    documents = table(spec["lengths"])
    sequence = PackSequence(documents, pack_tokens=128, seed=spec["seed"], window_documents=spec["window_documents"])
    for epoch in range(2):
        packs = epoch_packs(sequence, epoch)
        names = Counter(name for pack in packs for name in pack.document_names)
        assert names == Counter(documents.ids)
        for pack in packs:
            check_layout(pack, documents)


def check_layout(pack: Pack, documents: DocumentTable) -> None:
    """Rebuild the pack token by token, without slices."""
    expected = []
    for index, name in enumerate(pack.document_names):
        document = documents[documents.ids.index(name)]
        assert pack.document_lengths[index] == len(document.token_ids)
        for position, (token, mask) in enumerate(zip(document.token_ids, document.loss_mask, strict=True)):
            expected.append((token, mask, index, position))
    assert pack.num_tokens == len(expected) > 0
    assert pack.num_supervised == sum(row[1] for row in expected)
    expected += [(0, 0, -1, 0)] * (128 - len(expected))
    columns = (pack.token_ids, pack.loss_mask, pack.document_ids, pack.position_ids)
    assert [tuple(int(value) for value in row) for row in zip(*columns, strict=True)] == expected
    assert [column.dtype for column in columns] == [np.int32, np.uint8, np.int32, np.int32]


@settings(max_examples=20, deadline=None)
@given(spec=packings, order=st.randoms(use_true_random=False))
def test_a_pack_depends_on_nothing_but_spec_and_number(spec: dict, order) -> None:
    documents = table(spec["lengths"])
    fields = {"pack_tokens": 128, "seed": spec["seed"], "window_documents": spec["window_documents"]}
    first, second = PackSequence(documents, **fields), PackSequence(documents, **fields)
    numbers = list(range(first.total_packs(4)))
    in_order = {number: first.pack(number).token_ids.tobytes() for number in numbers}
    order.shuffle(numbers)
    assert {number: second.pack(number).token_ids.tobytes() for number in numbers} == in_order


def test_epochs_and_seeds_differ() -> None:
    documents = table([5 + index % 90 for index in range(200)])
    sequence = PackSequence(documents, pack_tokens=128, seed=0, window_documents=50)
    other = PackSequence(documents, pack_tokens=128, seed=1, window_documents=50)
    names = [[pack.document_names for pack in epoch_packs(sequence, epoch)] for epoch in range(2)]
    assert names[0] != names[1]
    assert names[0] != [pack.document_names for pack in epoch_packs(other, 0)]


def test_totals_agree_with_the_epochs() -> None:
    sequence = PackSequence(table([30, 60, 100, 127] * 20), pack_tokens=128, seed=3, window_documents=16)
    assert sequence.total_packs(0) == 0
    assert sequence.total_packs(5) == sum(len(epoch_packs(sequence, epoch)) for epoch in range(5))


def test_packs_are_the_same_in_every_version() -> None:
    """A change here changes every stream: checkpoints would resume on other data."""
    lengths = [1 + (index * index * 37) % 128 for index in range(300)]
    sequence = PackSequence(table(lengths), pack_tokens=128, seed=12345, window_documents=64)
    digest = hashlib.sha256()
    for number in range(sequence.total_packs(3)):
        digest.update(sequence.pack(number).token_ids.astype("<i4").tobytes())
    assert (sequence.total_packs(3), digest.hexdigest()[:16]) == (527, "6a7e3d1105c5fb6c")


def test_slots_are_filled() -> None:
    rng = np.random.Generator(np.random.PCG64(5))
    lengths = np.clip(rng.lognormal(5.6, 0.7, 3000).astype(int), 8, 2048).tolist()
    sequence = PackSequence(table(lengths), pack_tokens=2048, seed=0, window_documents=512)
    for epoch in range(2):
        assert sum(lengths) / ((sequence.total_packs(epoch + 1) - sequence.total_packs(epoch)) * 2048) >= 0.97


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=40))
def test_best_fit_decreasing_against_a_plain_search(sizes: list[int]) -> None:
    expected: list[list[int]] = []
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        loads = [sum(sizes[other] for other in one) for one in expected]
        fitting = [index for index, load in enumerate(loads) if load + sizes[item] <= 50]
        if fitting:
            expected[max(fitting, key=lambda index: (loads[index], -index))].append(item)
        else:
            expected.append([item])
    assert best_fit_decreasing(range(len(sizes)), sizes, 50) == expected


def test_a_table_gives_back_its_documents() -> None:
    documents = table([3, 1])
    assert len(documents) == 2 and documents.lengths.tolist() == [3, 1]
    assert documents[1].token_ids.tolist() == [1001] and documents[0].loss_mask.tolist() == [1, 0, 0]
    documents[0].token_ids[0] = 5
    assert documents[0].token_ids.tolist() == [1, 2, 3], "what it gives is a copy"
    with pytest.raises(IndexError):
        documents[2]


def test_counting_epochs_does_not_hold_up_a_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = PackSequence(table([5, 6, 7]), pack_tokens=10, seed=0, window_documents=8)
    first = sequence.pack(0)
    counting, go_on = threading.Event(), threading.Event()
    make_plan = sequence._make_plan

    def slow(epoch: int) -> object:
        if epoch == 3:
            counting.set()
            assert go_on.wait(20)
        return make_plan(epoch)

    monkeypatch.setattr(sequence, "_make_plan", slow)
    totals: list[int] = []
    thread = threading.Thread(target=lambda: totals.append(sequence.total_packs(5)))
    thread.start()
    assert counting.wait(10)
    asked = threading.Thread(target=lambda: totals.append(sequence.pack(0).num_tokens))
    asked.start()
    asked.join(10)
    assert totals == [first.num_tokens], "it came while the epochs were counted"
    go_on.set()
    thread.join(10)
    assert totals[1:] == [sum(len(epoch_packs(sequence, epoch)) for epoch in range(5))]
