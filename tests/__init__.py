"""Tests. Assertions in helpers report their values as those in tests do."""

import pytest

pytest.register_assert_rewrite("tests.helpers")
