import pytest

from tests.updates.measured import recorded


@pytest.fixture(scope="package")
def proxy():
    """The trace of a dense proxy of base width, of 40 steps."""
    return recorded(40)
