"""ESFT's training: the frozen stays bit for bit, N/E of the experts train; grouped experts."""

from itertools import combinations, permutations

import pytest
import torch
from transformers import AutoModelForCausalLM

from moebook.errors import Refusal
from moebook.methods import esft, pesc, upcycling
from moebook.methods.esft import grouping
from moebook.models import anatomy, fingerprint
from moebook.training import fit
from tests.families import of_family
from tests.refusals import refused


def sparse(model):
    return [layer for layer in anatomy(model).layers if layer.kind == "sparse"]


def selection_of(model, count=2, **options):
    experts = {layer.index: (3, 2, 1)[:count] for layer in sparse(model)}
    return esft.Selection(experts=experts, **options)


def tuned(model, rows):
    return fit(model, rows, steps=8, batch=6, lr=0.01, weight_decay=0.1, pad_id=2)


def full_step(model, batch):
    """One step of AdamW; bytes of gradients and of the optimizer's moments."""
    free = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(free, lr=0.01, weight_decay=0.1)
    model.train()(**batch).loss.backward()
    optimizer.step()
    moments = []
    for state in optimizer.state.values():
        moments += [state["exp_avg"].nbytes, state["exp_avg_sq"].nbytes]
    return sum(p.grad.nbytes for p in free), sum(moments)


def test_logits_and_gradients_of_the_chosen_experts_equal_those_of_the_base(
    family, mixture, batch
):
    base = mixture(family, dtype=torch.float64)
    model = esft.specialise(mixture(family, dtype=torch.float64), selection_of(base))
    want = base(**batch)
    got = model(**batch)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-9, atol=1e-9)
    want.loss.backward()
    got.loss.backward()
    for full, split in zip(sparse(base), sparse(model), strict=True):
        for part in ("gate_up_proj", "down_proj"):
            want = getattr(full.experts, part).grad[[3, 2]]
            got = getattr(split.experts, part).grad
            torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "kind", ["hunyuan_v1_moe", "afmoe", "hy_v3", "ernie4_5_moe", "laguna"]
)
def test_routers_without_a_weight_or_with_more_than_one_are_specialised(kind, batch):
    base = of_family(kind)
    model = of_family(kind)
    esft.specialise(model, selection_of(model))
    want = base(**batch)
    got = model(**batch)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
    want.loss.backward()
    got.loss.backward()
    for full, split in zip(sparse(base), sparse(model), strict=True):
        want = full.experts.down_proj.grad[[3, 2]]
        got = split.experts.down_proj.grad
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    assert fingerprint(esft.restore(model)) == fingerprint(base)


def test_shared_experts_are_found_under_the_names_that_families_give_them():
    for kind in ("hunyuan_v1_moe", "afmoe", "qwen2_moe"):
        model = of_family(kind)
        esft.specialise(model, selection_of(model, shared_experts=True))
        names = [name for name in esft.trained(model) if ".shared_" in name]
        assert len(names) == 3 * len(sparse(model))


@pytest.mark.parametrize(
    ("kind", "difference"),
    [
        ("longcat_flash", "a forward pass of its own"),
        ("llama4_text", "a forward pass of its own"),
        ("gpt_oss", "gate and up interleaved"),
        ("deepseek_v4", "a gate of its own"),
    ],
)
def test_experts_of_another_form_are_refused_before_anything_is_touched(
    kind, difference
):
    model = of_family(kind)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    modules = list(model.modules())
    base = fingerprint(model)
    message = f"E-MODEL: layer 0: .*, {difference}; expected"
    refused(message, esft.specialise, model, selection_of(model))
    if kind == "longcat_flash":
        # Without experts of no weight its weights have the usual shapes.
        plain = of_family(kind, zero_expert_num=0)
        refused(message, esft.specialise, plain, selection_of(plain))
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert list(model.modules()) == modules
    assert fingerprint(model) == base


def test_frozen_weights_are_bit_equal_after_adamw_with_weight_decay(
    family, mixture, rows
):
    model = esft.specialise(mixture(family), selection_of(mixture(family)))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    free = esft.trained(model)
    tuned(model, rows)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != (name in free), name
    assert len(free) == 2 * len(model.esft.selection.experts)
    esft.merge(model)
    for layer in sparse(model):
        name = next(n for n, module in model.named_modules() if module is layer.experts)
        moved = layer.experts.down_proj != before[f"{name}.frozen.down_proj"]
        assert moved.flatten(1).any(1).nonzero().flatten().tolist() == [2, 3]


def test_masking_gradients_inside_the_fused_tensor_would_not_freeze(mixture, batch):
    """Why the chosen experts are a parameter of their own: the alternative, shown to fail."""
    model = mixture("DeepseekV2").requires_grad_(False)
    weight = anatomy(model).layers[1].experts.down_proj.requires_grad_(True)
    before = weight.detach().clone()
    weight.register_hook(lambda grad: grad * (torch.arange(8) < 2).view(-1, 1, 1))
    full_step(model, batch)
    assert not torch.equal(weight[2:], before[2:])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("family", ["DeepseekV2", "Mixtral"])
def test_gradient_and_optimizer_bytes_are_the_chosen_share_of_full(
    family, count, mixture, batch
):
    full = mixture(family).requires_grad_(False)
    for layer in sparse(full):
        layer.experts.requires_grad_(True)
    experts = len(anatomy(full).layers[1].router.weight)
    model = esft.specialise(mixture(family), selection_of(full, count))
    whole = full_step(full, batch)
    share = full_step(model, batch)
    assert [part * experts for part in share] == [part * count for part in whole]
    frozen = [
        p for name, p in model.named_parameters() if name not in esft.trained(model)
    ]
    assert all(p.grad is None for p in frozen)


def test_merged_and_reloaded_the_logits_are_equal(
    family, mixture, batch, rows, tmp_path
):
    model = esft.specialise(mixture(family), selection_of(mixture(family)))
    tuned(model, rows)
    specialised = model.eval()(**batch).logits
    merged = esft.merge(model)(**batch).logits
    torch.testing.assert_close(merged, specialised, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "plain")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    stored = again.state_dict()
    whole = model.state_dict()
    assert stored.keys() == whole.keys()
    assert all(torch.equal(stored[name], whole[name]) for name in whole)
    # Read from a file, weights may lie askew, which changes the last bit.
    plain = mixture(family)
    plain.load_state_dict(stored)
    assert torch.equal(plain(**batch).logits, merged)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("option", ["shared_experts", "non_expert_modules", "router"])
def test_each_option_frees_its_own_modules_alone(option, mixture):
    model = mixture("DeepseekV2")
    esft.specialise(model, selection_of(model, **{option: True}))
    every = {name for name, _ in model.named_parameters() if ".experts." not in name}
    free = {name for name in esft.trained(model) if ".experts." not in name}
    shared = {name for name in every if ".shared_experts." in name}
    router = {name for name in every if ".mlp.gate." in name}
    owned = {
        "shared_experts": shared,
        "router": router,
        "non_expert_modules": every - shared - router,
    }
    assert free == owned[option] != set()


def test_a_bfloat16_base_trains_float32_copies_and_merges_into_bfloat16(
    mixture, batch, rows
):
    model = mixture("DeepseekV2", dtype=torch.bfloat16)
    esft.specialise(model, selection_of(model))
    tuned(model, rows)
    assert {p.dtype for p in esft.trained(model).values()} == {torch.float32}
    specialised = model.eval()(**batch).logits
    merged = esft.merge(model)(**batch).logits
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert (merged - specialised).abs().max() <= 0.05 * specialised.abs().max()


@pytest.mark.parametrize("method", ["pesc", "upcycling"])
def test_an_upcycled_model_is_specialised_and_trained(method, host, batch, rows):
    if method == "pesc":
        model = pesc.full_experts(
            host(), pesc.Config(experts=4, adapter_width=4, host="frozen")
        )
    else:
        model = upcycling.upcycle(host(), upcycling.Config(top_k=2))
    before = model(**batch).logits
    esft.specialise(model, selection_of(model))
    torch.testing.assert_close(model(**batch).logits, before, rtol=1e-4, atol=1e-4)
    loss = tuned(model, rows).loss
    assert loss[-1] < loss[0]


def test_what_does_not_fit_is_refused_and_the_model_untouched(
    mixture, host, monkeypatch
):
    model = mixture("DeepseekV2")
    base = fingerprint(model)
    layers = selection_of(model).experts
    adapters = pesc.craft(host(), pesc.Config(experts=4, adapter_width=4))
    for message, (given, experts) in {
        r"E-KEYS: .*names layers \[2\], the sparse ones are \[1, 2\]": (
            model,
            {2: (0,)},
        ),
        r"E-KEYS: .*names layers \[0, 1, 2\]": (model, {0: (0,), **layers}),
        r"E-RANGE: layer 1: expert 8, the model has 0 to 7": (
            model,
            {**layers, 1: (0, 8)},
        ),
        r"E-MODEL: LlamaForCausalLM is dense": (host(), {0: (0,)}),
        r"E-MODEL: layer 0: Adapters holds": (adapters, {0: (0,), 1: (0,)}),
    }.items():
        refused(message, esft.specialise, given, esft.Selection(experts=experts))
    for call in (esft.merge, esft.restore, esft.trained):
        refused("E-MODEL: the model has not been through esft", call, model)
    assert fingerprint(model) == base
    assert all(p.requires_grad for p in model.parameters())
    esft.specialise(model, selection_of(model))
    with pytest.raises(Refusal, match="E-MODEL: the model is specialised already"):
        esft.specialise(model, selection_of(model))
    model = mixture("Olmoe")
    experts = anatomy(model).layers[0].experts
    signs = {
        "is_transposed": "trans",
        "has_post_expert_norm": "a norm",
        "_apply_gate": "a gate",
    }
    for sign, what in signs.items():  # of experts that compute otherwise
        with monkeypatch.context() as patch:
            # Flags are the module's, the gate its class's.
            for owner in (experts, type(experts)):
                patch.setattr(owner, sign, lambda self, pre: pre, raising=False)
            with pytest.raises(
                Refusal, match=f"E-MODEL: layer 0: OlmoeExperts .* {what}"
            ):
                esft.specialise(model, selection_of(model))


def looked_at_all(matrix, size):
    """The paper's procedure in plain Python: of all groups of those left, the first of the best."""
    alike = grouping.similarity(matrix).tolist()
    left = list(range(len(matrix)))
    groups = []
    while left:
        pairs = {}
        for group in combinations(left, size):
            pairs[group] = sum(alike[i][j] for i, j in combinations(group, 2))
        groups.append(max(pairs, key=pairs.get))
        left = [expert for expert in left if expert not in groups[-1]]
    return tuple(groups)


@pytest.mark.parametrize("top", [1000, 2])  # of the counts: 2 makes many ties
@pytest.mark.parametrize(
    ("experts", "size"), [(6, 1), (8, 2), (12, 3), (12, 4), (10, 5), (12, 6)]
)
def test_groups_are_those_that_looking_at_all_of_them_finds(experts, size, top):
    for seed in range(3):
        torch.manual_seed(seed)
        matrix = torch.randint(0, top, (experts, experts)).double()
        matrix = (matrix + matrix.T).fill_diagonal_(0)
        assert esft.partition(matrix, size) == looked_at_all(matrix, size)


def test_a_hand_worked_case():
    # 0 and 2 point one way, 1 and 3 the other; 4 and 5 are unused.
    matrix = torch.zeros(6, 6)
    matrix[:4, 4:] = torch.tensor([[5, 1], [1, 5], [10, 2], [3, 15]])
    assert esft.partition(matrix, 2) == ((0, 2), (1, 3), (4, 5))
    equal = torch.ones(9, 9).double()
    assert esft.partition(equal, 3) == ((0, 1, 2), (3, 4, 5), (6, 7, 8))
    alike = grouping.similarity(matrix) / grouping.UNIT
    assert alike[0, 1:3].tolist() == pytest.approx([(5 + 5) / 26, 1])
    assert alike[4].max() == 0


def test_cooccurrence_equals_a_naive_count(mixture, batch):
    model = mixture("DeepseekV2")
    calls = {}
    for layer in anatomy(model).layers[1:]:
        layer.experts.register_forward_pre_hook(
            lambda module, args, index=layer.index: calls.update(
                {index: calls.get(index, args[1])}
            )
        )
    model(**batch)
    real = batch["attention_mask"].flatten().tolist()
    counted = esft.cooccurrence(model, [batch, batch])
    assert counted.keys() == calls.keys() == {1, 2}
    for layer, ids in calls.items():
        want = torch.zeros(8, 8).double()
        for token, chosen in enumerate(ids.tolist()):
            for i, j in permutations(chosen, 2):
                want[i, j] += real[token]
        assert torch.equal(counted[layer], 2 * want)


@pytest.mark.parametrize("size", [2, 4])
def test_whole_groups_are_taken_selected_and_trained_and_share_a_gate(
    size, mixture, batch
):
    model = mixture("DeepseekV2", num_experts_per_tok=4)
    groups = esft.group(model, esft.cooccurrence(model, [batch]), size)
    before = anatomy(mixture("DeepseekV2", num_experts_per_tok=4)).layers
    after = anatomy(model).layers
    scores = esft.measure(model, [batch])
    selection = esft.select(scores, esft.Config(), groups=groups)
    for layer, parts in groups.items():
        for members in map(list, parts):
            mean = before[layer].router.weight[members].mean(0)
            weight = after[layer].router.weight[members]
            torch.testing.assert_close(weight, mean.expand(len(members), -1))
            for kind in (scores.token, scores.gate):
                row = kind[layer][members]
                torch.testing.assert_close(
                    row, row[:1].expand(len(row)), rtol=1e-6, atol=1e-9
                )
        assert scores.token[layer].sum().item() == pytest.approx(1)
        taken = set(selection.experts[layer])
        assert all(taken.issuperset(part) or taken.isdisjoint(part) for part in parts)
    old = after[1].router.weight.detach().clone()
    full_step(esft.full(model), batch)
    weight = after[1].router.weight
    assert not torch.equal(weight, old)
    for members in groups[1]:
        assert torch.equal(weight[list(members)], weight[[members[0]] * len(members)])
    esft.specialise(model, selection)
    model(**batch).loss.backward()
    assert all(p.grad is not None for p in esft.trained(model).values())


# Routers that get a bias from their block, hold one, or keep their weight in a layer.
BY_MORE = {
    "hy_v3": "HYV3TopKRouter",
    "afmoe": "AfmoeTokenChoiceRouter",
    "gpt_oss": "GptOssTopKRouter",
    "lfm2_moe": "Lfm2MoeTopKRouter",
    "hunyuan_v1_moe": "HunYuanMoEV1Gate",
    "deepseek_v2": "DeepseekV2TopkRouter",  # which chooses among groups first
    "phimoe": "PhimoeTopKRouter",  # which samples
}


def test_groups_that_do_not_fit_are_refused(mixture, batch):
    model = mixture("DeepseekV2")
    correcting = mixture("DeepseekV3")
    wide = torch.ones(64, 64)
    check = grouping.check
    together = esft.cooccurrence(model, [batch])
    special = esft.specialise(
        mixture("DeepseekV2"), esft.Selection(experts={1: (0,), 2: (0,)})
    )
    done = mixture("DeepseekV2")
    esft.group(done, together, 1)
    no_divisor = "E-RANGE: the group size is {}, no divisor of 8"
    for message, call in {
        **{
            no_divisor.format(n): lambda n=n: esft.partition(together[1], n)
            for n in (0, 3, 5)
        },
        "E-TYPE: size is 2.0": lambda: esft.group(model, together, 2.0),
        "E-SHAPE: similarity: ": lambda: grouping.similarity(wide[:3]),
        "E-RANGE: .* size is 2, no divisor of 8 experts and of 3": lambda: check(
            model, [1, 2]
        ),
        "E-NONFINITE: cooccurrence is": lambda: esft.partition(torch.nan * wide, 2),
        "E-RANGE: 4,426,165,368 groups of 8, at most": lambda: esft.partition(wide, 8),
        "E-MODEL: layer 1: DeepseekV3TopkRouter chooses by more": lambda: check(
            correcting, [1]
        ),
        **{
            f"E-MODEL: layer .: {name} chooses by more": lambda kind=kind: check(
                of_family(kind), [1]
            )
            for kind, name in BY_MORE.items()
        },
        "E-MODEL: the model is specialised": lambda: esft.group(special, together, 1),
        "E-DATA: no real token": lambda: esft.cooccurrence(model, []),
        "E-MODEL: layer 1: its experts are grouped already": lambda: esft.group(
            done, together, 1
        ),
    }.items():
        refused(message, call)
