"""Padding keeps every row whole, on the side asked for."""

from moebook.data.padding import padded


def test_rows_are_filled_up_on_either_side_and_the_mask_says_what_is_real():
    ids, mask = padded([[5, 0], [7, 8, 9]], -100)
    assert ids.tolist() == [[5, 0, -100], [7, 8, 9]]
    assert mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    ids, mask = padded([[5, 0], [7, 8, 9]], 2, left=True)
    assert ids.tolist() == [[2, 5, 0], [7, 8, 9]]
    assert mask.tolist() == [[0, 1, 1], [1, 1, 1]]
