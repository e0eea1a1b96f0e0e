"""Failures of the engine contract show their values, as those of test modules do."""

import pytest

pytest.register_assert_rewrite("contract_base", "contract_sampling", "contract_capabilities", "contract_lifecycle")
pytest.register_assert_rewrite("adapter_contract")
