"""Fails at import, as a script with a missing dependency does."""

import a_module_that_nobody_has_installed  # noqa: F401
