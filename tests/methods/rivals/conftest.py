"""PEFT's own mixtures of a bank."""

import pytest
from peft import PeftModel

from moebook.methods import rocket


@pytest.fixture
def peft(base, tmp_path):
    """PEFT's own mixture of a bank, by its name for the way."""

    def mix(bank, way, weights, **more):
        host = None
        for lora in bank.values():
            folder = rocket.loras.write(lora, tmp_path / f"{way}-{lora.name}")
            if host is None:
                host = PeftModel.from_pretrained(base(), folder, adapter_name=lora.name)
            else:
                host.load_adapter(folder, lora.name)
        host.add_weighted_adapter(
            list(bank), weights, "mixed", combination_type=way, **more
        )
        host.set_adapter("mixed")
        return host

    return mix
