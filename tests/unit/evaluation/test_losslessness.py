"""A difference is an error in float32, and in reduced precision only above the stated gap."""

from drafter_trainer.evaluation.decode import Decoded
from drafter_trainer.evaluation.losslessness import first_difference


def decoded(tokens: list[int], gap: float) -> Decoded:
    return Decoded(tokens=tokens, gaps=[9.0] * (len(tokens) - 1) + [gap])


def test_equal_outputs_do_not_differ() -> None:
    assert first_difference("p", decoded([1, 2, 3], 0.0), decoded([1, 2, 3], 0.0), 0.0) is None


def test_in_float32_no_gap_is_small_enough() -> None:
    found = first_difference("p", decoded([1, 2], 0.0), decoded([1, 3], 0.0), 0.0)
    assert found is not None and not found.allowed
    assert (found.position, found.plain_token, found.speculative_token) == (1, 2, 3)


def test_the_larger_gap_of_both_decodings_decides() -> None:
    plain, speculative = decoded([1, 2], 0.1), decoded([1, 3], 0.3)
    allowed, refused = (first_difference("p", plain, speculative, bound) for bound in (0.3, 0.29))
    assert allowed is not None and allowed.allowed and allowed.top_two_gap == 0.3
    assert refused is not None and not refused.allowed


def test_an_output_that_stops_early_is_never_allowed() -> None:
    found = first_difference("p", decoded([1, 2, 3], 0.0), decoded([1, 2], 0.0), 0.5)
    assert found is not None and not found.allowed
    assert (found.position, found.plain_token, found.speculative_token) == (2, 3, None)
