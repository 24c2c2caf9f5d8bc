"""A result of a benchmark has a line a cell, so that a difference shows what was measured anew."""

from __future__ import annotations

import json

from warploom.json_lines import lines


def test_an_item_of_a_list_has_a_line_and_the_document_is_what_it_was() -> None:
    document = {"schema": 1, "machine": {"gpu": "H200"}, "cells": [{"a": [1, 2]}, {"b": "é\n"}]}
    text = lines(document)
    assert json.loads(text) == document
    assert len(text.splitlines()) == 8
    assert '  {"a": [1, 2]},' in text.splitlines()


def test_empty_lists_and_documents_stay_what_they_are() -> None:
    for document in ({}, {"cells": []}, {"states": (), "cells": [1]}):
        assert json.loads(lines(document)) == json.loads(json.dumps(document))
