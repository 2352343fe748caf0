"""The project of two tiny models, as a template for tests to copy."""

import pytest
import tiny


@pytest.fixture(scope="session")
def tiny_project(tmp_path_factory, tiny_model, tokenizer, write_wheel):
    """The directory of a project of which nothing is run yet; a test works on a copy."""
    return tiny.write_project(tmp_path_factory.mktemp("tiny"), tiny_model, tokenizer, write_wheel)
