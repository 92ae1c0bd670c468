import pytest


@pytest.fixture
def steps(monkeypatch):
    """The sparse steps that layers make, as a list: (layer, keys in its cache)."""
    from cab_hf.decode.step import SparseDecode

    made, attend = [], SparseDecode.attend

    def counted(self, q, k, v, scale):
        made.append((self.layer.layer_idx, k.shape[2]))
        return attend(self, q, k, v, scale)

    monkeypatch.setattr(SparseDecode, "attend", counted)
    return made


@pytest.fixture
def from_anywhere(monkeypatch):
    """Texts are read sparsely however short they are."""
    from cab_hf.decode import step

    monkeypatch.setattr(step, "DECODE_FROM", 0)
