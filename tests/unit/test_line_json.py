"""A result of a benchmark has a line for each case: a difference shows what was measured anew."""

from __future__ import annotations

import json
import math
import sys

from warploom.line_json import dumps


def test_an_item_of_a_list_has_a_line_and_the_document_stays_the_same() -> None:
    document = {"schema": 1, "machine": {"gpu": "H200"}, "cases": [{"a": [1, 2]}, {"b": "é\n"}]}
    text = dumps(document)
    assert json.loads(text) == document
    assert len(text.splitlines()) == 8
    assert '  {"a": [1, 2]},' in text.splitlines()


def test_what_json_has_no_word_for_is_read_by_any_parser_and_stays_a_wrong_result() -> None:
    """A kernel that gave NaN has an infinite error: other parsers refused the whole document."""
    found = json.loads(dumps({"cells": [{"error_share": math.inf, "spread": math.nan}]}))
    assert found == {"cells": [{"error_share": sys.float_info.max, "spread": None}]}


def test_empty_lists_and_documents_stay_the_same() -> None:
    for document in ({}, {"cases": []}, {"states": (), "cases": [1]}):
        assert json.loads(dumps(document)) == json.loads(json.dumps(document))
