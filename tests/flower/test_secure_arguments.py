"""Arguments of `SecureFedHEAL` that it does not know."""

from __future__ import annotations

import re

import pytest

from fedheal.flower.secure import SecureFedHEAL


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"foo": 3}, "SecureFedHEAL has no parameter 'foo'"),
        ({"treshold": 0.5}, "SecureFedHEAL has no parameter 'treshold' (did you mean 'threshold'?)"),
        ({"placement": "client"}, "SecureFedHEAL has no parameter 'placement'"),  # it is always the clients
    ],
)
def test_an_unknown_setting_is_named_with_the_nearest_one(settings, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        SecureFedHEAL(**settings)


def test_an_argument_without_a_name_is_rejected():
    with pytest.raises(TypeError, match=re.escape("SecureFedHEAL(0.5): name each argument")):
        SecureFedHEAL(0.5)
