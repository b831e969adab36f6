"""How many examples a property test tries: as many as the profile says (conftest.py), or a share of them."""

import hypothesis


def costly(times: int) -> hypothesis.settings:
    """Settings of a test whose examples compile programs or write files: so many times fewer than the profile says."""
    return hypothesis.settings(max_examples=max(1, hypothesis.settings().max_examples // times))
