"""A model that is looked at in evaluation mode comes back as it was, module by module."""

import pytest
from torch import nn

from moebook.nn.modes import evaluating


@pytest.mark.parametrize("training", [True, False])
def test_every_module_gets_its_own_mode_back(training):
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)))
    model.train(training)
    model[0].train(not training)
    before = [module.training for module in model.modules()]
    with pytest.raises(ZeroDivisionError), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise ZeroDivisionError
    assert [module.training for module in model.modules()] == before
