"""What `diagnose` says where it cannot run."""

import jax
import pytest

from jmp_rewrite import diagnose


def test_old_versions_of_jax_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with pytest.raises(NotImplementedError, match="needs JAX 0.11 or later"):
        diagnose(lambda x: x)
